"""The client that is killed: fetches what its one argument describes, says how it ended in words and by exit code."""

import json
import os
import sys
from pathlib import Path

from kimigguf.catalogue.remote import RemoteFile, RemoteSet
from kimigguf.download.fetch import download
from kimigguf.download.manifest import read_manifest
from kimigguf.download.policy import Policy
from kimigguf.errors import KimiggufError


def main() -> int:
    task = json.loads(sys.argv[1])
    files = tuple(RemoteFile(path=path, size_bytes=size, sha256=sha) for path, size, sha in task["remote"].pop("files"))
    remote = RemoteSet(files=files, **task["remote"])
    read_manifest(Path("/nonexistent"))  # brings in what is imported late, so that "ready" means ready
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    try:
        download(remote, Path(task["folder"]), environ=os.environ, policy=Policy(**task["policy"]))
    except KimiggufError as error:
        sys.stdout.write(f"{error.code}: {error.message} ({error.cause})\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
