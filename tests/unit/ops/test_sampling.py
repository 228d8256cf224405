import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3svc.ops.reference_sampling import gumbel, kept_ids, log_softmax, noise_bits, noise_keys, sample
from k3svc.ops.table import SampleRows

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
INF = math.inf


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def python_bits(seed: int, sample_index: int, position: int, token_id: int) -> int:
    """The definition in the module's docstring, in Python's integers."""
    key = mix((seed + GOLDEN) & MASK)
    key = mix(((key ^ sample_index) + GOLDEN) & MASK)
    key = mix(((key ^ position) + GOLDEN) & MASK)
    return mix((key + GOLDEN * (token_id + 1)) & MASK)


def python_gumbel(bits: int) -> float:
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


def bits_of(seed: int, sample_index: int, position: int, ids: Tensor) -> Tensor:
    key = noise_keys(torch.tensor([signed(seed)]), torch.tensor([sample_index]), torch.tensor([position]))
    return noise_bits(key[0], ids)


def make_rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: list[int] | int = 0,
    sample_index: list[int] | int = 0,
    position: list[int] | int = 0,
) -> SampleRows:
    def column(value: list[int] | int) -> Tensor:
        return torch.tensor([value] * count if isinstance(value, int) else value)

    return SampleRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seed=column(seed),
        sample_index=column(sample_index),
        position=column(position),
        host_greedy=(temperature == 0.0,) * count,
        host_filters=((top_k, torch.tensor(top_p).item(), torch.tensor(min_p).item()),) * count,
    )


def take(rows: SampleRows, index: list[int]) -> SampleRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position")
    return replace(
        rows,
        **{name: getattr(rows, name)[index] for name in names},
        host_greedy=tuple(rows.host_greedy[i] for i in index),
        host_filters=tuple(rows.host_filters[i] for i in index),
    )


def kept(logits: list[float], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    row = torch.tensor(logits)
    return kept_ids(row, row.double() / temperature, top_k=top_k, top_p=top_p, min_p=min_p).tolist()


# The noise

PINNED = {
    (0x0, 0, 0, 0): 0x2130748AAAC80268,
    (0x0, 0, 0, 1): 0x0CC78FB979CE5090,
    (0x0, 0, 1, 0): 0xD9EEF7F073D37C42,
    (0x0, 1, 0, 0): 0xD1C0270687984B37,
    (0x1, 0, 0, 0): 0xE28195DDD9EE4956,
    (0xFFFFFFFFFFFFFFFF, 0, 0, 0): 0x00FC86D80B488E96,
    (0x8000000000000000, 15, 1048575, 163839): 0xBEDC8FC2DE3B7783,
    (0x123456789ABCDEF, 3, 4096, 4095): 0x814961AB76E062A5,
    (0x2A, 0, 17, 2048): 0x42DFA9B22951D17C,
}


@pytest.mark.parametrize(("where", "bits"), PINNED.items())
def test_noise_bits_never_change(where: tuple[int, int, int, int], bits: int):
    seed, sample_index, position, token_id = where
    assert bits_of(seed, sample_index, position, torch.tensor([token_id])).item() == signed(bits)
    assert python_bits(*where) == bits


def test_mix_is_the_finaliser_of_splitmix64():
    # First outputs of the published generator (Vigna, splitmix64.c) from the state 1234567.
    assert noise_bits(torch.tensor(1234567), torch.arange(3)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        signed(9817491932198370423),
    ]


@given(
    seed=st.integers(0, MASK),
    sample_index=st.integers(0, 1000),
    position=st.integers(0, 2**40),
    ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=8),
)
@settings(max_examples=50)
def test_noise_follows_its_definition(seed: int, sample_index: int, position: int, ids: list[int]):
    bits = bits_of(seed, sample_index, position, torch.tensor(ids))
    expected = [python_bits(seed, sample_index, position, i) for i in ids]
    assert bits.tolist() == [signed(value) for value in expected]
    assert gumbel(bits).tolist() == pytest.approx([python_gumbel(value) for value in expected], rel=1e-12)


def test_extreme_bits_give_finite_noise():
    noise = gumbel(torch.tensor([0, -1, 2**63 - 1, -(2**63)]))
    assert noise.isfinite().all()
    assert noise[0] < -3.6 and noise[1] > 36.0


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position", "id"])
def test_noise_is_uniform_and_neighbours_are_independent(axis: str):
    count = 1 << 14
    at = torch.arange(count)
    zero = torch.zeros_like(at)
    if axis == "id":
        bits = bits_of(7, 0, 100, at)
    else:
        keys = noise_keys(*(at if name == axis else zero for name in ("seed", "sample_index", "position")))
        bits = noise_bits(keys, zero)
    uniform = ((bits >> 12) & (2**52 - 1)).double() / 2**52
    # 63 degrees of freedom: beyond 120 once in 20,000.
    assert chi_square(torch.histc(uniform, 64, 0, 1), torch.full((64,), 1 / 64)) < 120
    planes = torch.stack([(bits >> b) & 1 for b in range(64)]).double()
    changes = torch.stack([((bits[1:] ^ bits[:-1]) >> b) & 1 for b in range(64)]).double()
    limit = 4.5 * 0.5 / math.sqrt(count)
    assert (planes.mean(dim=1) - 0.5).abs().max() < limit
    assert (changes.mean(dim=1) - 0.5).abs().max() < limit
    for lag in (1, 2, 3, 64):
        pair = torch.corrcoef(torch.stack((uniform[:-lag], uniform[lag:])))[0, 1]
        assert abs(pair) < 4.5 / math.sqrt(count)


def test_seed_sample_index_and_position_do_not_trade_places():
    where = [(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    seeds, indices, positions = torch.tensor(where).T
    assert len(set(noise_keys(seeds, indices, positions).tolist())) == len(where)


# The law


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = counts.sum() * law
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("axis", ["seed", "sample_index", "position"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_choices_follow_the_softmax(axis: str, temperature: float):
    count = 3000
    logits = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5, 0.0, 1.0])
    key: dict[str, list[int] | int] = {"seed": 11, "sample_index": 0, "position": 0, axis: list(range(count))}
    rows = make_rows(
        count,
        temperature=temperature,
        seed=key["seed"],
        sample_index=key["sample_index"],
        position=key["position"],
    )
    counts = torch.bincount(sample(logits.expand(count, -1), rows), minlength=7)
    # 6 degrees of freedom: beyond 27.9 once in 10,000.
    assert chi_square(counts, torch.softmax(logits / temperature, 0)) < 27.9


def test_filtered_choices_follow_the_renormalised_softmax():
    count = 4000
    logits = torch.tensor([0.0, 3.0, 1.0, 2.5, -1.0, 2.0])
    rows = make_rows(count, top_k=4, top_p=0.95, position=list(range(count)))
    counts = torch.bincount(sample(logits.expand(count, -1), rows), minlength=6)
    ids = torch.tensor([1, 3, 5, 2])
    # Of the four, 2 has the mass 0.065: more than the 0.05 to drop, so all four stay.
    law = torch.softmax(logits[ids], 0)
    assert law[3] > 0.05
    assert counts[ids].sum() == count
    assert chi_square(counts[ids], law) < 21.1  # 3 degrees of freedom, once in 10,000


def test_the_choice_is_the_argmax_of_score_in_plain_python():
    logits = torch.randn(20, 33, generator=torch.Generator().manual_seed(3)) * 2
    seeds = [(5 * i) ** 11 % (1 << 63) for i in range(20)]
    rows = make_rows(
        20, temperature=0.7, seed=seeds, sample_index=[i % 3 for i in range(20)], position=[9 * i for i in range(20)]
    )
    temperature = float(rows.temperature[0])
    for i, chosen in enumerate(sample(logits, rows).tolist()):
        scores = [
            value / temperature + python_gumbel(python_bits(seeds[i], i % 3, 9 * i, token_id))
            for token_id, value in enumerate(logits[i].tolist())
        ]
        assert chosen == scores.index(max(scores))


# The filters


@pytest.mark.parametrize(
    ("logits", "filters", "expected"),
    [
        pytest.param([1.0, 3.0, 2.0, 0.0], {"top_k": 2}, [1, 2], id="top-k"),
        pytest.param([2.0, 3.0, 2.0, 2.0, 0.0], {"top_k": 2}, [0, 1, 2, 3], id="ties at the border of top-k stay"),
        pytest.param([3.0, 1.0, 3.0], {"top_k": 1}, [0, 2], id="ties for the first place stay"),
        pytest.param([1.0, 0.0, 2.0], {"top_k": 3}, [0, 1, 2], id="k = X"),
        pytest.param([1.0, 0.0, 2.0], {"top_k": 2**31 - 1}, [0, 1, 2], id="k > X"),
        pytest.param([1.0, -INF, 2.0], {"top_k": 1, "top_p": 1.0}, [2], id="p = 1"),
        pytest.param([0.0, 5.0, 1.0], {"top_p": 1e-30}, [1], id="p → 0 keeps the largest"),
        pytest.param([1.0, 1.0, 1.0], {"top_p": 1e-30}, [2], id="p → 0 of equals keeps the last"),
        # Mass 1/4 each; 0.25 and 0.5 are at most 1 - p = 0.5 and go.
        pytest.param([0.0] * 4, {"top_p": 0.5}, [2, 3], id="mass exactly at 1 - p goes"),
        pytest.param([0.0] * 4, {"top_p": 0.75}, [1, 2, 3], id="mass at 1 - p, p = 3/4"),
        # Over the two of top-k the masses are 4/7 and 3/7, so p = 0.5 keeps one; over all four they would be .4 and .3.
        pytest.param(
            [math.log(v) for v in (0.4, 0.3, 0.2, 0.1)], {"top_k": 2, "top_p": 0.5}, [0], id="renormalised in between"
        ),
        pytest.param([math.log(v) for v in (0.4, 0.3, 0.2, 0.1)], {"top_p": 0.5}, [0, 1], id="top-p alone"),
        pytest.param([math.log(v) for v in (0.5, 0.3, 0.15, 0.05)], {"min_p": 0.25}, [0, 1, 2], id="min-p"),
        pytest.param([0.0, 0.0, -1e-3], {"min_p": 1.0}, [0, 1], id="min-p = 1 keeps equals"),
        pytest.param([0.0, -1.0, -2.0], {"min_p": 0.3, "temperature": 2.0}, [0, 1, 2], id="min-p after temperature"),
        pytest.param([0.0, -1.0, -2.0], {"min_p": 0.3}, [0, 1], id="min-p without temperature"),
        pytest.param([-INF, 1.0, -INF, 0.5], {"top_p": 0.999}, [1, 3], id="banned ids have no mass"),
        pytest.param([-INF, 1.0, -INF], {"top_k": 2, "top_p": 0.9, "min_p": 0.1}, [1], id="fewer choices than k"),
        pytest.param([7.0], {"top_k": 5, "top_p": 0.1, "min_p": 1.0}, [0], id="vocabulary of one"),
        pytest.param([1e30, -1e30, 3e38], {"top_p": 0.9, "temperature": 1e-4}, [2], id="huge logits"),
    ],
)
def test_filters(logits: list[float], filters: dict[str, float], expected: list[int]):
    assert kept(logits, **filters) == expected  # type: ignore[arg-type]


def brute_force(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int] | None:
    """Kept ids by sorting everything, None where rounding decides."""
    scaled = {i: value / temperature for i, value in enumerate(logits)}
    if 0 < top_k < len(logits):
        border = sorted(logits)[-top_k]
        scaled = {i: value for i, value in scaled.items() if logits[i] >= border}
    peak = max(scaled.values())
    mass = {i: math.exp(value - peak) for i, value in scaled.items()}
    total = math.fsum(mass.values())
    keep = set(mass)
    if top_p < 1.0:
        ascending = sorted(mass, key=lambda i: (scaled[i], i))
        for place, i in enumerate(ascending[:-1]):
            below = math.fsum(mass[j] for j in ascending[: place + 1]) / total
            if abs(below - (1 - top_p)) < 1e-12:
                return None
            if below <= 1 - top_p:
                keep.discard(i)
    for i, value in mass.items():
        if min_p > 0.0 and abs(value - min_p) < 1e-12 and value != 1.0:
            return None
        if value < min_p:
            keep.discard(i)
    return keep


@given(
    # Few distinct values, so that ties are common.
    logits=st.lists(
        st.one_of(st.integers(-6, 6).map(lambda v: v / 2), st.floats(-30, 30, width=32)), min_size=1, max_size=40
    ),
    temperature=st.sampled_from([0.25, 1.0, 1.5]),
    top_k=st.integers(0, 45),
    top_p=st.floats(2.0**-20, 1.0, width=32),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
)
@settings(max_examples=400)
def test_filters_against_brute_force(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float):
    expected = brute_force(logits, temperature, top_k, top_p, min_p)
    assume(expected is not None)
    assert expected is not None
    assert kept(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) == sorted(expected)


def test_filters_against_brute_force_over_a_long_tail():
    generator = torch.Generator().manual_seed(5)
    for scale in (0.1, 1.0, 4.0):
        logits = (torch.randn(1003, generator=generator) * scale).tolist()
        for top_k, top_p in ((0, 0.9), (0, 0.1), (0, 0.9999), (200, 0.8), (0, 1e-6)):
            expected = brute_force(logits, 1.0, top_k, top_p, 0.0)
            assert expected is not None
            assert kept(logits, top_k=top_k, top_p=top_p) == sorted(expected)


def test_no_choice_leaves_the_kept_ids():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(9)).expand(500, -1)
    rows = make_rows(500, temperature=3.0, top_k=9, top_p=0.8, min_p=0.2, position=list(range(500)))
    allowed = kept(logits[0].tolist(), temperature=3.0, top_k=9, top_p=float(rows.top_p[0]), min_p=0.2)
    assert 2 < len(allowed) < 9
    assert set(sample(logits, rows).tolist()) == set(allowed)


# Rows


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33, 1000, 4096, 4097])
def test_greedy_takes_the_lowest_of_equals(size: int):
    logits = torch.zeros(3, size)
    first = size // 3
    logits[1, first:] = 1.0
    logits[2, -1] = 1.0
    assert sample(logits, make_rows(3, temperature=0.0)).tolist() == [0, first, size - 1]


def mixed_rows(count: int, vocab: int) -> tuple[Tensor, SampleRows]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(count, vocab, generator=generator) * 3
    kinds = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.8, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 40, 0.7, 0.05)]
    chosen = [kinds[i % len(kinds)] for i in range(count)]
    temperature, top_k, top_p, min_p = zip(*chosen, strict=True)
    return logits, SampleRows(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        sample_index=torch.arange(count) % 4,
        position=torch.randint(0, 100_000, (count,), generator=generator),
        host_greedy=tuple(t == 0.0 for t in temperature),
        host_filters=tuple((k, torch.tensor(p).item(), torch.tensor(m).item()) for _, k, p, m in chosen),
    )


@pytest.mark.parametrize("vocab", [7, 129, 1001, 4096])
def test_a_row_does_not_depend_on_the_others(vocab: int):
    logits, rows = mixed_rows(64, vocab)
    alone = [sample(logits[i : i + 1], take(rows, [i])).item() for i in range(64)]
    single = torch.cat([log_softmax(logits[i : i + 1].clone()) for i in range(64)])
    for count in range(1, 65):
        start = (7 * count) % (65 - count)
        index = list(range(start, start + count))[::-1]
        assert sample(logits[index], take(rows, index)).tolist() == [alone[i] for i in index]
        assert torch.equal(log_softmax(logits[index]), single[index])


def test_noise_bits_of_an_id_do_not_depend_on_its_neighbours():
    ids = torch.arange(300)
    whole = gumbel(bits_of(3, 1, 70, ids))
    for start in range(0, 40, 3):
        for count in (1, 2, 7, 8, 9, 31, 64, 100):
            assert torch.equal(gumbel(bits_of(3, 1, 70, ids[start : start + count])), whole[start : start + count])


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_row_without_finite_logits_disturbs_no_other(bad: float, everywhere: bool):
    logits, rows = mixed_rows(15, 33)
    expected = sample(logits, rows)
    broken = list(range(5, 10))
    logits[broken, slice(None) if everywhere else slice(4, 6)] = bad
    chosen = sample(logits, rows)
    assert ((chosen >= 0) & (chosen < 33)).all()
    others = [i for i in range(15) if i not in broken]
    assert torch.equal(chosen[others], expected[others])


def test_log_softmax_is_correctly_rounded():
    logits = torch.randn(4, 211, generator=torch.Generator().manual_seed(2)) * 8
    for row, got in zip(logits.tolist(), log_softmax(logits), strict=True):
        peak = max(row)
        total = peak + math.log(math.fsum(math.exp(v - peak) for v in row))
        assert got.dtype is torch.float32
        assert torch.equal(got, torch.tensor([v - total for v in row], dtype=torch.float64).float())
