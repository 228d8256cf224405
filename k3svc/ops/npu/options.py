"""What the comma-separated text behind `npu:` in `model.device` chooses."""

from dataclasses import dataclass

from k3svc.errors import BackendError

OPTIONS = {
    "kda-extend": ("fused", "decomposed"),
    "graphs": ("off", "on"),
    "mla-split-norm": ("unfused", "fused"),
    "mla-store": ("scatter", "prefix"),
}
"""What may be chosen, the default first."""


@dataclass(frozen=True, kw_only=True)
class NpuOptions:
    """One choice of each."""

    kda_extend: str = "fused"
    """fused: one chunk_kda_fwd. decomposed: seven kernels."""
    graphs: str = "off"
    """on: decode, verify and draft steps are captured and replayed."""
    mla_split_norm: str = "unfused"
    """unfused: the latents of MLA are split, then normed apart. fused: one kernel, which rounds otherwise."""
    mla_store: str = "scatter"
    """scatter: rows of MLA go into the cache by npu_scatter_nd_update_, padding into the dummy page. prefix: by the
    kernel that stores the valid prefix of blocks of rows, padding nowhere."""

    @property
    def words(self) -> tuple[str, ...]:
        """As they are written in `model.device`."""
        return tuple(f"{name}={getattr(self, name.replace('-', '_'))}" for name in OPTIONS)


def split_options(text: str) -> tuple[NpuOptions, list[str]]:
    """The options of a comma-separated text, and the words that are none of ours. Raises BackendError."""
    words = [word for word in text.split(",") if word]
    chosen: dict[str, str] = {}
    for name, allowed in OPTIONS.items():
        given = {word.partition("=")[2] for word in words if word.startswith(f"{name}=")}
        if len(given) > 1:
            raise BackendError(f"model.device: {name} is given as {' and as '.join(sorted(given))}", device=text)
        if given - set(allowed):
            raise BackendError(f"model.device: {name}={min(given)!r}; allowed: {', '.join(allowed)}", device=text)
        if given:
            chosen[name.replace("-", "_")] = given.pop()
    return NpuOptions(**chosen), [word for word in words if word.partition("=")[0] not in OPTIONS]
