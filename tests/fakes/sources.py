"""Sets of files as `ollama-register` finds them, made without reading their headers."""

from pathlib import Path

from kimigguf.ollama.source import Source, SourceFile


def source_of(paths: tuple[Path, ...], label: str = "UD-IQ1_S", sha256: dict[str, str] | None = None) -> Source:
    sizes = [path.stat().st_size for path in paths]
    return Source(
        label=label,
        quant=None,
        architecture="kimi-k3",
        size_bytes=sum(sizes),
        files=tuple(
            SourceFile(path=path, size_bytes=size, sha256=(sha256 or {}).get(path.name))
            for path, size in zip(paths, sizes, strict=True)
        ),
        folder=paths[0].parent,
    )
