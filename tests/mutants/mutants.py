"""The mutants: code that is right, what to put in its place, and who must notice.

`old` must be found exactly once in the file. A mutant is one mistake that somebody could make.
"""

from dataclasses import dataclass

SIM = "simulation"
_HANDOFFS = "tests/unit/engine/test_handoff_engines.py"
_BOUNDS = "tests/unit/engine/test_bounds.py"
_LANDING = "tests/unit/transfer/test_landing.py"
_VERIFY_OPS = "tests/conformance/test_verify.py"
_PROBABILITIES = "tests/conformance/test_probabilities.py"
_REFERENCE_KDA = "k3svc/ops/reference_kda.py"
_REFERENCE_STEPS = "k3svc/ops/reference_steps.py"
_CPU_STEPS = "k3svc/ops/cpu/steps.py"
_SCHEDULER_TESTS = "tests/unit/core/test_decode_scheduler.py"
_AHEAD_TESTS = "tests/unit/core/test_schedule_ahead.py"
_SPECULATION_TESTS = "tests/unit/core/test_speculation.py"
_VERIFY = "tests/unit/engine/test_verify.py"
_DRAFTERS = "tests/unit/engine/test_speculation.py"
_BATCH = "k3svc/core/batch.py"
_SPECULATION = "k3svc/core/speculation.py"
_SPECULATOR = "k3svc/engine/speculator.py"
_DECODE_SCHEDULER = "k3svc/core/decode_scheduler.py"
_PREFILL_SCHEDULER = "k3svc/core/prefill_scheduler.py"
_DECODE = "k3svc/engine/decode.py"
_PREFILL = "k3svc/engine/prefill.py"
_PREFIX_CACHE = "k3svc/core/prefix_cache.py"
_PREFIX_TESTS = "tests/unit/core/test_prefix_cache.py"
_PREFIX_ENGINE_TESTS = "tests/unit/engine/test_prefix_cache.py"
_TRANSFER = "k3svc/transfer/landing.py"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One mistake. `found_by`: SIM, or a file of tests."""

    name: str
    path: str
    old: str
    new: str
    found_by: str = SIM


MUTANTS = (
    Mutant(
        name="page freed twice",
        path=_DECODE_SCHEDULER,
        old='            sample.slot, sample.pages, sample.fork = None, array("q"), None\n',
        new="            pass\n",
    ),
    Mutant(
        name="slot not zeroed",
        path="k3svc/ops/reference_steps.py",
        old="np.flatnonzero(starts == 0)",
        new="np.flatnonzero(starts < 0)",
        found_by="tests/unit/engine/test_runner.py",
    ),
    Mutant(
        name="slot reused while a step of decode may write",
        path=_DECODE_SCHEDULER,
        old="        if sample.num_steps == 0:\n            self._give_back(sample)\n",
        new="        self._give_back(sample)\n",
    ),
    Mutant(
        name="memory given back while the step that was built ahead may write",
        path=_DECODE_SCHEDULER,
        old="                if sample.num_steps == 0:\n                    self._give_back(sample)\n",
        new="                self._give_back(sample)\n",
        found_by=_AHEAD_TESTS,
    ),
    Mutant(
        name="slot of a paused sample taken while a step may write",
        path=_DECODE_SCHEDULER,
        old="one.paused and one.num_steps == 0",
        new="one.paused",
        found_by=_AHEAD_TESTS,
    ),
    Mutant(
        name="step built ahead of what is penalised",
        path=_DECODE_SCHEDULER,
        old="spec.counts is None and ",
        new="",
        found_by=_AHEAD_TESTS,
    ),
    Mutant(
        name="drafters told of a sample while a step without its features runs",
        path=_SPECULATOR,
        old=" and not self._scheduler.is_in_step:",
        new=":",
        found_by="tests/unit/engine/test_pipeline.py",
    ),
    Mutant(
        name="token of the step before taken from another row",
        path="k3svc/engine/inputs.py",
        old="sources[index] = count + before.places[row.key]",
        new="sources[index] = count + index",
        found_by="tests/unit/engine/test_runner_ahead.py",
    ),
    Mutant(
        name="slot reused while a step of prefill may write",
        path=_PREFILL_SCHEDULER,
        old="        if not prompt.in_step:\n            self._give_back(prompt)\n",
        new="        self._give_back(prompt)\n",
    ),
    Mutant(
        name="frame written after its memory was given back",
        path=_TRANSFER,
        old="        self._closed = True\n",
        new="        pass\n",
        found_by=_LANDING,
    ),
    Mutant(
        name="frame accepted from an old attempt or another request",
        path=_TRANSFER,
        old="if (manifest.request_id, manifest.attempt) != (want.request_id, want.attempt):",
        new="if False:",
    ),
    Mutant(
        name="old attempt served",
        path=_PREFILL,
        old="if job is not None and call.attempt < job.call.attempt:",
        new="if False:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="ended attempt served",
        path=_PREFILL,
        old="        if call.attempt <= self._forgotten.get(call.request_id, 0):",
        new="        if False:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="release of an old attempt ends the new one",
        path=_PREFILL,
        old="if job is None or job.call.attempt > attempt:",
        new="if job is None:",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="token applied twice",
        path=_DECODE_SCHEDULER,
        old="                sample.num_cached += max(1, len(tokens))\n",
        new="                sample.num_cached += max(1, len(tokens)) if len(sample.output) != 3 else 0\n",
    ),
    Mutant(
        name="hand-off token skipped",
        path=_DECODE_SCHEDULER,
        old="            if isinstance(row, DecodeRow):\n",
        new="            if isinstance(row, DecodeRow) or not sample.request.generated:\n",
    ),
    Mutant(
        name="lease ignored",
        path=_PREFILL,
        old="        if idle_s < self._lease_s:\n",
        new="        if idle_s < 1e9:\n",
    ),
    Mutant(
        name="lease not renewed by reading",
        path=_PREFILL,
        old="        if job.handoff is handoff:\n            job.idle_since = None\n",
        new="        pass\n",
        found_by=_BOUNDS,
    ),
    Mutant(
        name="cancel lost during reserve",
        path=_DECODE,
        old="                transfer.puller.close()\n                transfer.task.cancel()\n",
        new="                pass\n",
    ),
    Mutant(
        name="CRC unchecked",
        path=_TRANSFER,
        old="return checksum == frame.crc32c",
        new="return True",
    ),
    Mutant(
        name="frame out of sequence accepted",
        path=_TRANSFER,
        old="if frame.sequence != self.next_sequence:",
        new="if frame.sequence < self.next_sequence:",
        found_by=_LANDING,
    ),
    Mutant(
        name="missing layer accepted",
        path=_TRANSFER,
        old="        if self.missing:\n",
        new="        if False:\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="deadline ignored by decode",
        path=_DECODE,
        old="        if not live.stream.is_ended:\n            self._end(live, DeadlineExceeded(",
        new="        if False:\n            self._end(live, DeadlineExceeded(",
    ),
    Mutant(
        name="deadline ignored by prefill",
        path=_PREFILL,
        old="        if remaining_s is not None:\n",
        new="        if False:\n",
    ),
    Mutant(
        name="duplicate terminal message",
        path="k3svc/engine/stream.py",
        old="                self._taken = True\n",
        new="                self._taken = self._on_cancel is None\n",
    ),
    Mutant(
        name="fingerprint not compared",
        path=_PREFILL,
        old="        if field_name is not None:\n",
        new="        if False:\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="partial page shared by forked samples",
        path=_DECODE_SCHEDULER,
        old="        shared = len(lead.request.prompt) // self._page_size\n        slots",
        new="        shared = -(-len(lead.request.prompt) // self._page_size)\n        slots",
    ),
    Mutant(
        name="state of a preempted sample taken for present",
        path=_DECODE_SCHEDULER,
        old="            sample.num_cached = size\n",
        new="            sample.num_cached = max(size, sample.num_known - 1)\n",
    ),
    Mutant(
        name="stream unbounded",
        path=_DECODE,
        old="live.stream.num_unread >= self._max_unread_tokens",
        new="live.stream.num_unread < 0",
    ),
    Mutant(
        name="reader comes back unnoticed",
        path=_DECODE,
        old="            self.scheduler.pause(stream.request_id, paused=False)\n",
        new="            pass\n",
    ),
    Mutant(
        name="queue unbounded",
        path=_DECODE_SCHEDULER,
        old="        if len(self.waiting) >= self._max_waiting:\n",
        new="        if False:\n",
    ),
    Mutant(
        name="resumed stream starts over",
        path="k3svc/engine/handoff.py",
        old="            next_sequence=landing.next_sequence,\n",
        new="            next_sequence=0,\n",
        found_by=_HANDOFFS,
    ),
    Mutant(
        name="requests forgotten when the service stops",
        path=_DECODE,
        old='                self._end(live, Unavailable("this decode service stops", reason="STOPPED"), "failed")\n',
        new="                pass\n",
    ),
    Mutant(
        name="one accepted draft too few committed",
        path=_REFERENCE_KDA,
        old="if accepted[step.order[i]] >= place]",
        new="if accepted[step.order[i]] > place]",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="accepted drafts of another sequence committed",
        path=_REFERENCE_KDA,
        old="if accepted[step.order[i]] >= place]",
        new="if accepted[i] >= place]",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="state written for a draft",
        path=_REFERENCE_KDA,
        old="        if index == 0:\n            pool.state.index_copy_(0, step.slots, states)\n",
        new="        pool.state.index_copy_(0, step.slots, states)\n",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="convolution window off by one after the anchor",
        path=_REFERENCE_KDA,
        old="        if index == 0:\n            pool.conv.index_copy_(0, step.slots, states)\n",
        new="        if index == len(step.rounds) - 1:\n            pool.conv.index_copy_(0, step.slots, states)\n",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="convolution not committed",
        path=_REFERENCE_KDA,
        old="        _shift(windows, conv.u.index_select(0, rows))\n",
        new="        pass\n",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="draft sees one key too many",
        path=_REFERENCE_STEPS,
        old="[position + 1 for position in positions]",
        new="[position + 1 + (position > meta.host_starts[owner]) for position, owner in zip(positions, owners)]",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="drafts leave their state, cpu",
        path=_CPU_STEPS,
        old="drafts=_step(meta, drafts, keeps_states=True)",
        new="drafts=_step(meta, drafts)",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="commit begins at the anchor, cpu",
        path=_CPU_STEPS,
        old="run._replace(row=run.row + 1, length=count, start=run.start + 1)",
        new="run._replace(row=run.row, length=count, start=run.start + 1)",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="accepted drafts counted by live sequences, cpu",
        path=_CPU_STEPS,
        old="[accepted[run.table] for run in self.runs]",
        new="list(accepted[: len(self.runs)])",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="records of a step committed twice",
        path=_REFERENCE_KDA,
        old="    step.kda_records.append(KdaRecord(pool=pool, qkv=qkv, f=f, b=b, gate=gate))\n",
        new="    step.kda_records.extend([KdaRecord(pool=pool, qkv=qkv, f=f, b=b, gate=gate)] * 2)\n",
        found_by=_VERIFY_OPS,
    ),
    Mutant(
        name="law without the filters",
        path="k3svc/ops/reference_sampling.py",
        old="        out[index, ids] = scaled[ids].softmax(dim=-1).float()\n",
        new="        out[index, ids] = scaled.softmax(dim=-1)[ids].float()\n",
        found_by=_PROBABILITIES,
    ),
    Mutant(
        name="penalties see the drafts of no row",
        path=_BATCH,
        old="                output[token_id] = output.get(token_id, 0) + 1\n",
        new="                output.setdefault(token_id, 0)\n",
        found_by=_VERIFY,
    ),
    Mutant(
        name="stop tokens banned for a whole block",
        path=_BATCH,
        old="            banned=self.banned if left > 0 else frozenset(),\n",
        new="            banned=self.banned,\n",
        found_by=_VERIFY,
    ),
    Mutant(
        name="all rows of a block drawn with the noise of its first",
        path=_BATCH,
        old="            position=self.position + len(drafts),\n",
        new="            position=self.position,\n",
        found_by=_VERIFY,
    ),
    Mutant(
        name="a rejected draft drawn again",
        path="k3svc/engine/verify.py",
        old="draw(row, residual(p, q))",
        new="draw(row, p)",
        found_by=_VERIFY,
    ),
    Mutant(
        name="accepted drafts not committed",
        path="k3svc/engine/runner.py",
        old="[max(0, len(sampled.get(row.key, ())) - 1) for row in batch.rows]",
        new="[0 for _ in batch.rows]",
        found_by="tests/unit/engine/test_runner.py",
    ),
    Mutant(
        name="drafts past max_tokens",
        path=_DECODE_SCHEDULER,
        old="self.num_left(sample) - 1) if row.sample",
        new="self.num_left(sample)) if row.sample",
        found_by=_SCHEDULER_TESTS,
    ),
    Mutant(
        name="pages of rejected drafts kept",
        path=_DECODE_SCHEDULER,
        old="        keep = sample.num_cached // self._page_size + 1\n",
        new="        keep = len(sample.pages)\n",
        found_by=_SCHEDULER_TESTS,
    ),
    Mutant(
        name="a late proposal used whatever came out since",
        path=_SPECULATION,
        old="    if tuple(output[anchor + 1 :]) != tuple(tokens[:first]):\n",
        new="    if False:\n",
        found_by=_SPECULATION_TESTS,
    ),
    Mutant(
        name="the mask proposed",
        path=_SPECULATION,
        old=" and tokens[good] != mask_token_id",
        new="",
        found_by=_SPECULATION_TESTS,
    ),
    Mutant(
        name="features of drafts not pushed",
        path=_SPECULATOR,
        old="                count = 1 + len(row.drafts)\n",
        new="                count = 1\n",
        found_by=_DRAFTERS,
    ),
    Mutant(
        name="a preempted sample followed on",
        path=_SPECULATOR,
        old="if one.sample.phase is not Phase.RUNNING]",
        new="if one.sample.phase is Phase.ENDED]",
        found_by=_DRAFTERS,
    ),
    Mutant(
        name="tokens after a stop string counted",
        path=_DECODE,
        old="            self.scheduler.cut(sample, len(sample.output) - len(emission.tokens) + len(taken))\n",
        new="",
        found_by="tests/unit/engine/test_speculation_nano.py",
    ),
    Mutant(
        name="prompt goes on from its slot instead of the snapshot",
        path=_PREFILL_SCHEDULER,
        old="            restore_from=self._restore_from(prompt),\n",
        new="",
        found_by=_PREFIX_TESTS,
    ),
    Mutant(
        name="snapshot given away while a step reads it",
        path=_PREFIX_CACHE,
        old="next((node for node in self._snapshots if not node.readers), None)",
        new="next(iter(self._snapshots), None)",
        found_by=_PREFIX_TESTS,
    ),
    Mutant(
        name="cached page given up while a prompt holds it",
        path=_PREFIX_CACHE,
        old="        node.users += 1\n        self._idle.pop(node, None)\n",
        new="        node.users += 1\n",
        found_by=_PREFIX_TESTS,
    ),
    Mutant(
        name="last token of a prompt taken from the cache",
        path=_PREFIX_CACHE,
        old="self._blocks(token_ids, 0, len(token_ids) - 1)",
        new="self._blocks(token_ids, 0, len(token_ids))",
        found_by=_PREFIX_TESTS,
    ),
    Mutant(
        name="prompts of other tenants found",
        path=_PREFILL,
        old='namespace=call.tenant if self._is_isolated else ""',
        new='namespace=""',
        found_by=_PREFIX_ENGINE_TESTS,
    ),
    Mutant(
        name="what a failed step computed is gone on from",
        path=_PREFILL,
        old="            self.scheduler.distrust(self._stepping[key][0].prompt)\n",
        new="",
        found_by=_PREFIX_ENGINE_TESTS,
    ),
    Mutant(
        name="features of cached tokens left out",
        path=_PREFILL,
        old="push_cached(self.scheduler.cache.path(prompt.node)",
        new="push_cached([]",
        found_by=_PREFIX_ENGINE_TESTS,
    ),
)
