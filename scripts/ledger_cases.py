"""Command lines with the engine's own memory report: recorded ones, and random ones asked live.

The bar for each device: model and context within 0.1 % or 2 MiB; compute never under the engine's figure by more than
2 % or 16 MiB, and never over it by more than 25 % or 256 MiB.
"""

import json
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpc_devices import RpcDevices

from kimigguf.engines.report import Columns, parse_report
from kimigguf.memory.flags import parse
from kimigguf.memory.ledger import Column, ledger
from kimigguf.memory.model import ModelSpec
from kimigguf.units import MIB

GOLDEN: Final = Path(__file__).parents[1] / "tests" / "data" / "golden_fit.jsonl"
QUANTS: Final = ("UD-IQ1_S", "UD-IQ2_XXS", "UD-Q2_K_XL", "UD-Q4_K_XL")
_ANSWER_SECONDS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line for a quant on so many devices."""

    quant: str
    devices: int
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.quant} on {self.devices} devices: {' '.join(self.arguments)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One column of one device: what the ledger says and what the engine does, in MiB."""

    device: str
    column: Column
    ledger_mib: float
    engine_mib: int

    @property
    def percent(self) -> float:
        """How far the ledger is over the engine (negative: under), as a share of the engine's figure."""
        # The engine's report drops fractions of a MiB: a difference below one is none.
        over = self.ledger_mib - self.engine_mib
        return 0.0 if 0 <= over < 1 or not self.engine_mib else 100 * over / self.engine_mib

    @property
    def is_within_the_bar(self) -> bool:
        over = self.ledger_mib - self.engine_mib
        if self.column is Column.COMPUTE:
            return -max(16, 0.02 * self.engine_mib) <= over <= max(256, 0.25 * self.engine_mib)
        return abs(over) <= max(2, 0.001 * self.engine_mib)

    def __str__(self) -> str:
        return f"{self.device} {self.column}: {self.ledger_mib:.1f} MiB, engine {self.engine_mib}"


def golden() -> Iterator[tuple[Case, Mapping[str, Columns]]]:
    """The recorded answers; the first line of the file says of which engine."""
    for line in GOLDEN.read_text(encoding="utf-8").splitlines()[1:]:
        row = json.loads(line)
        case = Case(quant=row["quant"], devices=row["devices"], arguments=tuple(row["args"]))
        yield (
            case,
            {
                name: Columns(**{f"{column}_bytes": size * MIB for column, size in sizes.items()})
                for name, sizes in row["mib"].items()
            },
        )


def differences(spec: ModelSpec, case: Case, answer: Mapping[str, Columns]) -> list[Difference]:
    """The ledger beside the engine's answer, whose devices come in order with the host last."""
    parsed = parse(case.arguments, spec, devices=case.devices)
    counted = ledger(spec, parsed.settings, parsed.layout)
    places = [*range(len(counted.devices)), None]
    return [
        Difference(
            device=name,
            column=column,
            ledger_mib=counted.total_bytes(place, column=column) / MIB,
            engine_mib=getattr(columns, f"{column}_bytes") // MIB,
        )
        for place, (name, columns) in zip(places, answer.items(), strict=True)
        for column in (Column.MODEL, Column.CONTEXT, Column.COMPUTE)
    ]


def ask(running: RpcDevices, model: Path, case: Case) -> Mapping[str, Columns]:
    """The engine's report for a case; empty where it refuses the command line."""
    rpc = ("--rpc", running.addresses(case.devices)) if case.devices else ()
    done = subprocess.run(
        [running.folder / "llama-fit-params", "-m", model, "-fitp", "on", *rpc, *case.arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=_ANSWER_SECONDS,
    )
    return parse_report(done.stdout)


def random_case(chance: random.Random) -> Case:
    """Any command line that llama-server takes for K3, common or not."""
    devices = chance.choice((0, 1, 2, 2, 3, 4))
    flash = chance.choice(("on", "on", "on", "auto", "off"))
    quantized = () if flash == "off" else ("q8_0", "q4_0", "q5_1", "q5_0", "q4_1", "iq4_nl")
    kind = chance.choice(("f16", "f16", "bf16", "f32", *quantized))
    contexts = (4096, 5000, 10_000, 32_768, 100_000, 131_072, 200_000, 262_144, 524_288, 1_048_576)
    words = ["-c", chance.choice(contexts), "-np", chance.choice((1, 1, 2, 3, 5, 6, 7, 8))]
    words += ["-ub", chance.choice((256, 300, 384, 512, 777, 1024, 1536, 2048, 4096))]
    words += ["-b", chance.choice((512, 2048, 4096)), "-ctk", kind, "-ctv", kind, "-fa", flash]
    if devices:
        words += ["-ngl", chance.choice((99, 99, 99, 94, 93, 92, 80, 61, 50, 33, 20, 10, 5, 1, 0))]
        words += _placement(chance, devices)
    words += ["--no-repack", "-fit", "off"]
    return Case(quant=chance.choice(QUANTS), devices=devices, arguments=tuple(map(str, words)))


def _placement(chance: random.Random, devices: int) -> list[object]:
    words: list[object] = []
    if devices > 1 and chance.random() < 0.8:
        words += ["-ts", ",".join(str(chance.choice((1, 2, 3, 5, 0.5, 0.1, 0))) for _ in range(devices - 1)) + ",1"]
    patterns = (
        "exps=CPU",
        r"blk\.(1[0-9]|2[0-9])\.ffn_(up|down)_exps=CPU",
        "ffn_gate_exps=CPU",
        r"blk\.[0-9]\.=CPU",
        "shexp=CPU",
        r"blk\.(3|7|11)\.attn=CPU",
        r"output\.weight=CPU",
        r"\.ffn_.*=CPU",
    )
    way = chance.random()
    if way < 0.2:
        words += ["-ncmoe", chance.randrange(1, 94)]
    elif way < 0.35:
        words += ["-cmoe"]
    elif way < 0.6:
        words += ["-ot", chance.choice(patterns)]
    if chance.random() < 0.2:
        words += ["-nkvo"]
    return words
