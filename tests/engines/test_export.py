"""Plans as files for other programs: read back by those programs, wherever they are on this machine."""

import configparser
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import docker
from fakes.plans import make_layout, make_plan

from kimigguf.engines.command import VARIABLES, command
from kimigguf.engines.engine import EngineDevice, EngineKind, FoundEngine
from kimigguf.engines.export import Option, Service, options
from kimigguf.engines.export_docker import docker_script
from kimigguf.engines.export_files import environment, preset, shell_script
from kimigguf.engines.export_systemd import systemd_unit
from kimigguf.engines.serving import load_serving
from kimigguf.errors import UsageError

PROFILE = load_serving("kimi-k3", {})
AWKWARD = "/srv/big models/100% $HOME \\n 'k3'"
SYSTEMD = Path("/lib/systemd/systemd")


def service(
    *extra: str,
    folder: str = AWKWARD,
    devices: str = "CUDA",
    host: str = "127.0.0.1",
    port: int = 8080,
    key: str | None = None,
    environ: dict[str, str] | None = None,
    user: tuple[int, int, str] | None = (1000, 1000, "kim"),
    path: str = "/opt/llama 1.0/llama-server",
    kind: EngineKind = EngineKind.LLAMA_SERVER,
) -> Service:
    """A plan over two accelerators, with rules for tensors, in a folder whose name every format has to quote."""
    count = 2 if devices else 0
    split = [None] * 33 + [0] * 30 + [1] * 30
    layout = make_layout(split, experts=[None] * 93, head=1, devices=2) if devices else None
    plan = make_plan(layout=layout, folder=Path(folder))
    names = tuple(f"{devices}{index}" for index in range(count))
    engine = FoundEngine(
        kind=kind,
        path=path,
        version="v",
        build=11434,
        supports_k3=True,
        backends=None,
        devices=tuple(EngineDevice(name=name, description="GPU") for name in names),
    )
    made = command(plan, engine, profile=PROFILE, host=host, port=port, api_key_file=key, extra=extra)
    return Service(
        plan=plan,
        command=made,
        devices=names,
        variables={**{s.flag: s.variable for s in PROFILE.settings if s.variable}, **VARIABLES},
        environ=environ or {},
        host=host,
        port=port,
        remake="kimigguf plan UD-IQ1_M --format systemd",
        api_key_file=key,
        user=user[0] if user else None,
        group=user[1] if user else None,
        user_name=user[2] if user else None,
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


# -- the command line, taken apart -------------------------------------------------------------------------------------


def test_a_negative_number_is_a_value_and_no_flag() -> None:
    found = list(options(["--threads", "-1", "--metrics", "-t", "4", "--newer-flag", "x", "--newer-switch", "--jinja"]))
    assert found == [
        Option(flag="--threads", value="-1"),
        Option(flag="--metrics"),
        Option(flag="-t", value="4"),
        Option(flag="--newer-flag", value="x"),
        Option(flag="--newer-switch"),
        Option(flag="--jinja"),
    ]


@pytest.mark.parametrize("words", [["stray"], ["--threads"]])
def test_a_word_of_no_flag_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        list(options(words))
    assert caught.value.code == "not-expressible"


@pytest.mark.parametrize("write", [systemd_unit, docker_script, environment, preset, shell_script])
def test_a_folder_with_a_line_break_is_refused_by_every_format(write: object) -> None:
    assert callable(write)
    with pytest.raises(UsageError) as caught:
        write(service(folder="/models/a\nb"))
    assert caught.value.code == "not-expressible"


# -- systemd -----------------------------------------------------------------------------------------------------------


def directives(text: str) -> dict[str, list[str]]:
    """Every ``Key=value`` of a unit, continued lines joined; comments left out."""
    found: dict[str, list[str]] = {}
    for line in text.replace(" \\\n", " ").splitlines():
        if "=" in line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_reads_the_exact_command_line(open_folder: Path) -> None:
    """By systemd's own parser: it prints each unit as it understood it."""
    if not SYSTEMD.is_file() or shutil.which("setpriv") is None or os.getuid() != 0:
        pytest.skip("needs systemd, setpriv and root, to have systemd read a unit as another user")
    made = service("--threads", "3", "--grammar", 'a "b" $$ %h \\d ;', key="/etc/k3 key", environ={"A": '1 %h $x "y"'})
    (open_folder / "kimi-k3.service").write_text(systemd_unit(made).text)
    shown = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(SYSTEMD), "--test", "--system",
         "--unit=kimi-k3.service"],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "SYSTEMD_UNIT_PATH": f"{open_folder}:"},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    unit = shown.partition("Unit kimi-k3.service")[2].partition("\n-> Unit ")[0]
    line = unit.partition("-> ExecStart:")[2].partition("Command Line: ")[2].partition("\n")[0]
    words = subprocess.run(["sh", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout
    read = [word.replace("$$", "$") for word in words.split("\0")[:-1]]
    wanted = list(made.command.argv)
    wanted[wanted.index("/etc/k3 key")] = "${CREDENTIALS_DIRECTORY}/api-key"
    assert read == wanted
    for said in ("Restart: on-abnormal", 'Environment: A=1 %h $x "y"', "ProtectSystem: strict", "User: kim"):
        assert said in unit


@pytest.mark.parametrize(
    "made",
    [service(), service(devices="", user=None), service(host="0.0.0.0", port=443, key="/k"), service("-lm", "x")],
)
def test_systemd_finds_nothing_to_say_against_the_unit(made: Service, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # What it runs must be a program, for systemd-analyze looks.
    made = replace(made, command=replace(made.command, argv=("/bin/true", *made.command.argv[1:])))
    path = tmp_path / "kimi-k3.service"
    path.write_text(systemd_unit(made).text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_unit_keeps_the_key_out_of_the_command_line_and_the_gpus_in_reach() -> None:
    said = directives(systemd_unit(service(key="/etc/k3/key", host="10.0.0.5")).text)
    assert said["LoadCredential"] == ["api-key:/etc/k3/key"]
    assert "/etc/k3/key" not in said["ExecStart"][0]
    assert "--api-key-file ${CREDENTIALS_DIRECTORY}/api-key" in said["ExecStart"][0]
    nodes, unified = said["ExecStartPre"]
    # As the driver's own library asks for them: -u makes the devices of unified memory in place of the cards'.
    assert nodes.startswith("-+/usr/bin/nvidia-modprobe -c 255 -c 0 -c 1 ")
    assert "-u" not in nodes
    assert unified == "-+/usr/bin/nvidia-modprobe -u -c 0"
    for breaks in ("PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "ProcSubset", "DeviceAllow"):
        assert breaks not in said
    assert "IPAddressDeny" not in said, "others are to reach it"
    assert directives(systemd_unit(service()).text)["IPAddressAllow"] == ["localhost"]


def test_a_unit_starts_again_what_can_pass_and_never_ends_a_load() -> None:
    said = directives(systemd_unit(service()).text)
    assert (said["Restart"], said["RestartPreventExitStatus"]) == (["on-abnormal"], ["SIGILL"])
    assert (said["TimeoutStartSec"], said["MemorySwapMax"], said["LimitCORE"]) == (["infinity"], ["0"], ["0"])
    assert said["KillMode"] == ["mixed"]


def test_a_unit_may_lock_memory_only_where_the_engine_is_told_to() -> None:
    assert "LimitMEMLOCK" not in directives(systemd_unit(service()).text)
    locking = service("--load-mode", "mmap+mlock")
    assert directives(systemd_unit(locking).text)["LimitMEMLOCK"] == ["infinity"]
    assert "memlock=-1" in docker_script(locking).text


def test_files_in_tmp_are_not_hidden_from_the_unit_by_a_tmp_of_its_own() -> None:
    assert directives(systemd_unit(service()).text)["PrivateTmp"] == ["yes"]
    assert "PrivateTmp" not in directives(systemd_unit(service(folder="/tmp/k3")).text)


def test_a_unit_lets_the_engine_write_where_it_is_told_to() -> None:
    assert "ReadWritePaths" not in directives(systemd_unit(service()).text)
    made = service("--slot-save-path", "/srv/my slots", "-lcd", "/srv/cache/lookup.bin")
    assert directives(systemd_unit(made).text)["ReadWritePaths"] == ['"/srv/my slots"', "/srv/cache"]


def test_a_plan_that_is_refused_does_not_empty_the_unit_that_is_there() -> None:
    (install,) = [notice for notice in systemd_unit(service()).notices if notice.startswith("to install it: ")]
    steps = install.partition(": ")[2].split(" && ")
    assert steps[0] == f"{service().remake} > kimi-k3.service"
    assert steps[1] == "sudo install -m 644 kimi-k3.service /etc/systemd/system/"


# -- Docker ------------------------------------------------------------------------------------------------------------


def docker_words(text: str) -> list[str]:
    """The words of the script's ``docker run``."""
    line = text.replace("\\\n", " ").splitlines()[-1]
    words = shlex.split(line)
    assert words[:2] == ["docker", "run"]
    return words


def test_docker_itself_understands_the_script(tmp_path: Path) -> None:
    """Docker's real command line, with a daemon that keeps what it is asked for."""
    program = shutil.which("docker")
    if program is None:
        pytest.skip("there is no docker here")
    made = service(
        "--threads", "3", key="/etc/k3,key", environ={"CUDA_VISIBLE_DEVICES": "1,0", "LD_LIBRARY_PATH": "/x"}
    )
    export = docker_script(made)
    with docker.running(tmp_path) as daemon:
        done = subprocess.run(
            ["sh"], input=export.text, capture_output=True, text=True, check=False, timeout=60,
            env={"PATH": f"{Path(program).parent}:/usr/bin:/bin", "DOCKER_HOST": f"unix://{daemon.socket}",
                 "HOME": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (daemon.networks, daemon.started) == (["kimi-k3"], 1)
    asked = daemon.containers[0]
    host = asked["HostConfig"]
    assert asked["Image"] == "ghcr.io/ggml-org/llama.cpp:server-cuda"
    assert asked["User"] == "1000:1000"
    assert asked["Env"] == ["CUDA_VISIBLE_DEVICES=1,0"]
    assert any("LD_LIBRARY_PATH" in notice for notice in export.notices)
    assert host["PortBindings"] == {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8080"}]}
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert [(m["Source"], m["Target"], m["ReadOnly"]) for m in host["Mounts"]] == [
        (AWKWARD, "/models", True),
        ("/etc/k3,key", "/run/secrets/api-key", True),
    ]
    assert (host["NetworkMode"], host["CapDrop"], host["Init"]) == ("kimi-k3", ["ALL"], True)
    inside = {
        str(made.plan.model.folder) + "/Kimi-K3-UD-IQ1_M-00001-of-00003.gguf": (
            "/models/Kimi-K3-UD-IQ1_M-00001-of-00003.gguf"
        ),
        "127.0.0.1": "0.0.0.0",
        "/etc/k3,key": "/run/secrets/api-key",
    }
    assert asked["Cmd"] == [inside.get(word, word) for word in made.command.argv[1:]]


@pytest.mark.parametrize(
    ("devices", "tag", "needs"),
    [
        ("", "server", []),
        ("CUDA", "server-cuda", ["--gpus all"]),
        ("ROCm", "server-rocm", ["--device /dev/kfd", "--device /dev/dri", "--ipc host", '"$(stat -c %g /dev/dri']),
        ("Vulkan", "server-vulkan", ["--device /dev/dri"]),
        ("SYCL", "server-intel", ["--device /dev/dri"]),
    ],
)
def test_the_image_and_the_devices_follow_the_plans_accelerators(devices: str, tag: str, needs: list[str]) -> None:
    text = docker_script(service(devices=devices)).text
    assert f"ghcr.io/ggml-org/llama.cpp:{tag} " in text
    assert all(need in text for need in needs)
    assert ("--gpus" in text) == (devices == "CUDA")


def test_accelerators_without_an_image_are_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError) as caught:
        docker_script(service(devices="MTL"))
    assert (caught.value.code, "MTL0" in caught.value.message) == ("no-image", True)


def test_another_address_and_port_are_published_and_the_container_stays_as_the_image_has_it() -> None:
    words = docker_words(docker_script(service(host="::", port=9000, key="/k")).text)
    assert words[words.index("--publish") + 1] == "[::]:9000:8080"
    assert words[words.index("--port") + 1] == "8080"


@pytest.mark.parametrize("host", ["k3.example.org", "a..b"])
def test_a_name_that_docker_cannot_publish_on_is_refused(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        docker_script(service(host=host, key="/k"))
    assert (caught.value.code, host in caught.value.message) == ("not-expressible", True)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8080"), ("::1", "http://[::1]:8080"), ("::", "http://[::1]:8080"),
     ("0.0.0.0", "http://127.0.0.1:8080"), ("10.0.0.5", "http://10.0.0.5:8080")],
)  # fmt: skip
@pytest.mark.parametrize("write", [systemd_unit, docker_script, environment, preset, shell_script])
def test_where_it_answers_is_an_address_that_a_client_can_take(host: str, url: str, write: object) -> None:
    assert callable(write)
    assert f"it answers at {url}/v1" in write(service(host=host, key="/k")).notices


def test_a_file_that_no_container_has_is_refused_and_tls_files_are_mounted() -> None:
    with pytest.raises(UsageError, match="--chat-template-file"):
        docker_script(service("--chat-template-file", "/x.jinja"))
    words = docker_words(docker_script(service("--ssl-key-file", "/k.pem", "--ssl-cert-file", "/c.pem")).text)
    assert words[words.index("--ssl-key-file") + 1] == "/run/secrets/key.pem"
    assert "type=bind,src=/c.pem,dst=/run/secrets/cert.pem,readonly" in words
    assert "--no-healthcheck" in words


# -- environment, preset, shell ----------------------------------------------------------------------------------------


def test_a_shell_reads_every_variable_as_it_is_meant(tmp_path: Path) -> None:
    made = service("--threads", "3", environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    export = environment(made)
    (tmp_path / "k3.env").write_text(export.text)
    shown = subprocess.run(
        ["env", "-i", "/bin/sh", "-c", "set -a; . ./k3.env; /usr/bin/env -0"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    found = dict(item.split("=", 1) for item in shown.split("\0") if item)
    argv = made.command.argv
    for flag, variable in made.variables.items():
        if flag in argv and variable != "LLAMA_ARG_NO_REPACK" and argv[argv.index(flag) + 1][:2] != "--":
            assert found[variable] == argv[argv.index(flag) + 1], flag
    assert (found["LLAMA_ARG_NO_REPACK"], found["CUDA_VISIBLE_DEVICES"]) == ("1", "1,0")
    assert any("--no-op-offload --threads 3" in notice for notice in export.notices), "what it cannot say is told"


def test_systemd_s_own_reader_of_environment_files_would_see_no_escape_of_its_own() -> None:
    """Outside quotes systemd drops a backslash: a value that has one is quoted."""
    for line in environment(service()).text.splitlines():
        if "\\" in line and not line.startswith("#"):
            assert line.partition("=")[2][0] == "'"


def test_a_preset_holds_the_model_and_tells_the_routers_own_options() -> None:
    export = preset(service(key="/etc/k3 key"))
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes=(";",), delimiters=("=",))
    parser.read_string(export.text)
    said = dict(parser["kimi-k3"])
    assert said["model"] == f"{AWKWARD}/Kimi-K3-UD-IQ1_M-00001-of-00003.gguf"
    assert (said["no-repack"], said["fit"], said["ctx-size"]) == ("true", "off", "32768")
    assert not said.keys() & {"host", "port", "api-key-file", "cors-origins", "alias"}
    start = next(notice for notice in export.notices if notice.startswith("to start it"))
    for words in (
        "--models-max 1",
        "--host 127.0.0.1",
        "--port 8080",
        "--api-key-file '/etc/k3 key'",
        "--cors-origins",
    ):
        assert words in start


@pytest.mark.parametrize("folder", ["/models/a;b", "/models/a#b"])
def test_what_a_preset_would_cut_short_is_refused(folder: str) -> None:
    with pytest.raises(UsageError) as caught:
        preset(service(folder=folder))
    assert caught.value.code == "not-expressible"


def test_a_script_hands_on_the_exact_words_and_none_of_the_shells_own_options(tmp_path: Path) -> None:
    program = tmp_path / "llama server"
    program.write_text(
        '#!/bin/sh\nprintf "%s\\0" "$@"\nenv | grep -c "LLAMA_\\|HF_TOKEN"\necho "$CUDA_VISIBLE_DEVICES"\n'
    )
    program.chmod(0o755)
    made = service(path=str(program), environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    done = subprocess.run(
        ["sh"], input=shell_script(made).text, capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "LLAMA_ARG_N_CPU_MOE": "3", "LLAMA_API_KEY": "x", "HF_TOKEN": "y"},
    )  # fmt: skip
    *words, last = done.stdout.split("\0")
    assert tuple(words) == made.command.argv[1:]
    assert last.split() == ["0", "1,0"]


def test_the_unified_binary_is_started_with_its_subcommand() -> None:
    made = service(path="/opt/llama", kind=EngineKind.LLAMA)
    assert made.program == ("/opt/llama", "serve")
    assert "exec /opt/llama serve \\\n" in shell_script(made).text
    assert "/opt/llama serve --models-preset" in preset(made).text
