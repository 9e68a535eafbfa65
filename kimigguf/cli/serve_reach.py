"""How clients reach a ready server: its address by the name that its certificate is for, and a client to start from."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kimigguf.engines.llama_server import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How clients reach a server: its URL, curl's words before it, and lines on what must hold for that."""

    url: str
    curl: str = ""
    remarks: tuple[str, ...] = ()

    @classmethod
    def of(cls, address: "Address", extra: Sequence[str]) -> "Reach":
        """From where the server listens and what its engine was told besides."""
        from kimigguf.engines.tls import check_files, client_host, tls_files

        files = tls_files(extra)
        if files is None:
            return cls(url=address.url)
        names = check_files(files).names
        own = address.reachable_host.strip("[]")
        name = client_host(names, own)
        fits = name in names
        certificate = shlex.quote(str(files.certificate))
        resolve = "" if name == own else f"--resolve {name}:{address.port}:{own} "
        remarks = [f"  certificate {files.certificate}, for {', '.join(names) or 'no name'}"]
        if not fits:
            remarks.append(f"             (clients that check names refuse it: it is not for {own})")
        elif name != own:
            remarks.append(f"             ({name} must lead to this machine where clients run)")
        host = f"[{name}]" if ":" in name else name
        return cls(
            url=f"https://{host}:{address.port}", curl=f"--cacert {certificate} {resolve}", remarks=tuple(remarks)
        )


def snippet(base_url: str, model: str, *, needs_key: bool, certificate: str | None = None) -> tuple[str, ...]:
    """A client that keeps the whole assistant message: K3 expects its reasoning and tool calls back."""
    key = 'os.environ["KEY"]' if needs_key else '"none"'
    trust = (
        f"trust = ssl.create_default_context(cafile={certificate!r})",
        "trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN",
    )
    client = ", http_client=DefaultHttpxClient(verify=trust)" if certificate else ""
    return (
        *(("import os",) if needs_key else ()),
        *(("import ssl",) if certificate else ()),
        f"from openai import {'DefaultHttpxClient, ' if certificate else ''}OpenAI",
        *(trust if certificate else ()),
        f'client = OpenAI(base_url="{base_url}", api_key={key}{client})',
        'messages = [{"role": "user", "content": "Hello"}]',
        f'reply = client.chat.completions.create(model="{model}", messages=messages).choices[0].message',
        "messages.append(reply.model_dump(exclude_none=True))  # with reasoning_content and tool_calls",
        'messages.append({"role": "user", "content": "And now?"})',
    )
