"""`k3svc plan`: sizes, times and numbers of instances before anything is bought or started."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3svc.cli.generate import echo_json
from k3svc.errors import ConfigError

if TYPE_CHECKING:
    from k3svc.plan.capacity import Plan


def plan(
    model: Annotated[str, typer.Option(help="k3, kimi-linear, nano, or a folder with a config.json.")] = "k3",
    chips: Annotated[int, typer.Option(min=1, help="Chips that work as one instance of a role.")] = 32,
    tflops: Annotated[float, typer.Option(help="Peak of a chip, 10^12 operations/s.")] = 400.0,
    memory_gb: Annotated[float, typer.Option(help="Memory of a chip, 10^9 bytes.")] = 64.0,
    memory_gb_s: Annotated[float, typer.Option(help="Memory bandwidth of a chip, 10^9 bytes/s.")] = 1600.0,
    link_gbit_s: Annotated[float, typer.Option(help="Link from a prefill to a decode instance, 10^9 bit/s.")] = 100.0,
    compute_efficiency: Annotated[float, typer.Option(help="Share of the peak that steps reach.")] = 0.4,
    memory_efficiency: Annotated[float, typer.Option(help="Share of the bandwidth that steps reach.")] = 0.6,
    dense_bits: Annotated[float, typer.Option(help="Bits of a weight outside the routed experts.")] = 16.0,
    routed_bits: Annotated[
        float | None, typer.Option(help="Bits of a weight of the routed experts; default: as published (K3: 4.25).")
    ] = None,
    state_dtype: Annotated[str, typer.Option(help="KDA states: float32 or bfloat16.")] = "float32",
    request_rate: Annotated[float, typer.Option(help="Requests per second.")] = 10.0,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")] = 8192,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 512,
    tpot_ms: Annotated[float, typer.Option(help="Objective of the time per output token.")] = 50.0,
    cached_share: Annotated[float, typer.Option(help="Share of prompt tokens that a prefix cache spares.")] = 0.0,
    chunk_tokens: Annotated[int, typer.Option(min=64, help="prefill.chunk_tokens.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate cache and hand-off sizes, times, the P:D ratio, and what limits a deployment.

    Example: k3svc plan --model k3 --chips 64 --link-gbit-s 200 --input-len 32768 --request-rate 5
    """
    # What follows loads torch, which takes seconds.
    from k3svc.model.config import ModelConfig  # noqa: PLC0415
    from k3svc.plan.capacity import Hardware, Load, Plan, Weights  # noqa: PLC0415
    from k3svc.plan.models import KNOWN, ROUTED_BITS, known_model  # noqa: PLC0415

    widths = {"float32": 4, "bfloat16": 2}
    if state_dtype not in widths:
        raise typer.BadParameter(f"{state_dtype!r}; allowed: {', '.join(widths)}", param_hint="--state-dtype")
    if model not in KNOWN and not Path(model).is_dir():
        raise ConfigError(f"--model: {model!r} is no folder and none of {', '.join(KNOWN)}")
    made = Plan(
        known_model(model) if model in KNOWN else ModelConfig.from_directory(Path(model)),
        Hardware(
            chips=chips,
            tflops=tflops,
            memory_gb=memory_gb,
            memory_gb_s=memory_gb_s,
            link_gbit_s=link_gbit_s,
            compute_efficiency=compute_efficiency,
            memory_efficiency=memory_efficiency,
        ),
        Load(
            request_rate=request_rate,
            input_len=input_len,
            output_len=output_len,
            tpot_ms=tpot_ms,
            cached_share=cached_share,
        ),
        weights=Weights(
            dense_bits=dense_bits, routed_bits=ROUTED_BITS.get(model, 16.0) if routed_bits is None else routed_bits
        ),
        chunk_tokens=chunk_tokens,
        state_bytes=widths[state_dtype],
    )
    values = plan_json(model, made)
    if as_json:
        echo_json(values)
    else:
        _print(values, made)


def plan_json(name: str, made: "Plan") -> dict[str, Any]:
    """All figures; those of decode are None when no request fits."""
    from k3svc.plan.capacity import LINK_SPEEDS_GBIT_S  # noqa: PLC0415  loads torch

    links = sorted({*LINK_SPEEDS_GBIT_S, made.hardware.link_gbit_s})
    fits = made.fits
    return {
        "model": name,
        "parameters": made.parameters.total,
        "active_parameters": made.parameters.active,
        "weight_bytes": made.weight_bytes,
        "cache_bytes_fixed": made.cache.fixed,
        "cache_bytes_per_token": made.cache.per_token,
        "cache_bytes_per_request": made.cache.request(made.load.input_len + made.load.output_len),
        "handoff_bytes": made.handoff_bytes,
        "handoff": [
            {"gbit_s": speed, "ms": made.handoff_s(speed) * 1e3, "tail_ms": made.handoff_tail_s(speed) * 1e3}
            for speed in links
        ],
        "local_below_tokens": made.local_below,
        "prefill_ms": made.prefill_s * 1e3,
        "link_use": made.link_use,
        "batch": made.batch,
        "batch_by_memory": made.memory_batch,
        "batch_by_objective": made.objective_batch,
        "tpot_ms": made.step_s(made.batch) * 1e3 if fits else None,
        "decode_tokens_per_s": made.batch / made.step_s(made.batch) if fits else None,
        "prefill_instances": made.prefill_instances,
        "decode_instances": made.decode_instances if fits else None,
        "prefill_per_decode": made.prefill_instances / made.decode_instances if fits else None,
        "bottleneck": made.bottleneck,
    }


def _print(values: dict[str, Any], made: "Plan") -> None:
    load, hardware = made.load, made.hardware
    title = (
        f"{values['model']}: {load.request_rate:g} requests/s of {load.input_len} + {load.output_len} tokens on "
        f"instances of {hardware.chips} chips"
    )
    lines = [f"{name:<22}{text}" for name, text in _rows(values, made)]
    typer.echo("\n".join([title, *lines, f"\nbottleneck: {values['bottleneck']}"]))


def _rows(values: dict[str, Any], made: "Plan") -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{_count(values['parameters'])}, {_count(values['active_parameters'])} active"),
        ("weights", _size(values["weight_bytes"])),
        (
            "cache of a request",
            (
                f"{_size(made.cache.fixed)} + {made.cache.per_token:,} B/token "
                f"= {_size(values['cache_bytes_per_request'])}"
            ),
        ),
        ("hand-off", _size(values["handoff_bytes"])),
    ]
    for link in values["handoff"]:
        mark = "  <- this link" if link["gbit_s"] == made.hardware.link_gbit_s else ""
        shown = f"{link['ms']:,.2f} ms, of it after the last chunk {link['tail_ms']:,.2f} ms{mark}"
        rows.append((f"  over {link['gbit_s']:g} Gbit/s", shown))
    local = values["local_below_tokens"]
    rows += [
        ("cheaper on decode", f"prompts below {local:,} tokens" if local > 1 else "no prompt"),
        (
            "prefill of a prompt",
            f"{values['prefill_ms']:,.1f} ms; busy, it fills {100 * made.link_use:.1f} % of the link",
        ),
        (
            "decode batch",
            (
                f"{values['batch']:,} (memory allows {values['batch_by_memory']:,}, the objective "
                f"{values['batch_by_objective']:,})"
            ),
        ),
    ]
    if made.fits:
        prefill, decode = values["prefill_instances"], values["decode_instances"]
        rows += [
            ("decode step", f"{values['tpot_ms']:,.1f} ms, {values['decode_tokens_per_s']:,.0f} tokens/s an instance"),
            (
                "instances",
                (
                    f"{math.ceil(prefill)} prefill ({prefill:.2f}), {math.ceil(decode)} decode ({decode:.2f}); "
                    f"P:D {values['prefill_per_decode']:.2f}"
                ),
            ),
        ]
    return rows


def _count(number: float) -> str:
    return f"{number / 1e9:,.2f} G" if number >= 1e9 else f"{number / 1e6:,.2f} M"


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:.0f} B"
