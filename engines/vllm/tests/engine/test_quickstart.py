"""The README's steps from an empty environment to a tier under ``vllm serve``."""

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

from support.redis_server import free_port
from vllm_server import (
    OPTIONS,
    VARIABLES,
    complete,
    make_model,
    make_words,
    name_vllm,
    serving,
    wait_for,
)

ROOT = Path(__file__).parents[4]
#: The words of the prompt: enough for several blocks of 128 tokens.
WORDS = 400
PROMPT = make_words(0, WORDS)


def commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    section = text.partition("\n## Run it under vLLM\n")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[:1]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def make_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    purelib = Path(sysconfig.get_path("purelib"))
    shared = folder / "shared"
    shared.mkdir()
    for found in purelib.iterdir():
        if "kvtier" not in found.name and found.suffix != ".pth":
            (shared / found.name).symlink_to(found)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "shared.pth").write_text(str(shared))
    name_vllm(own)
    program = folder / "bin" / "vllm"
    program.write_text(
        f"#!{folder}/bin/python\n"
        "from vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n"  # vLLM's processes import this file too
        "    raise SystemExit(main())\n"
    )
    program.chmod(0o755)
    return program.parent


def test_five_commands_lead_to_a_verified_tier(tmp_path: Path) -> None:
    programs = make_environment(tmp_path / "env")
    model, chunks, port = tmp_path / "model", tmp_path / "kv", free_port()
    make_model(model)
    asked = commands()
    assert len(asked) == 5
    told = {"/data/kv": str(chunks), "200GiB": "1GiB", "32GiB": "256MiB", "MODEL": str(model)}
    variables = {**os.environ, **VARIABLES, "PATH": f"{programs}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)

    def run(command: str) -> str:
        for word, own in told.items():
            command = command.replace(word, own)
        place = ROOT if command.startswith("pip ") else tmp_path
        done = subprocess.run(
            ["bash", "-c", command], cwd=place, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    install, configure, check, serve, look = asked
    run(install)
    run(configure)
    assert "ok" in run(check).splitlines()[-1]
    for word, own in told.items():
        serve = serve.replace(word, own)
    serve += f" {OPTIONS} --max-model-len 1024 --port {port}"
    with serving(serve, variables, tmp_path, port):
        first = complete(port, str(model), PROMPT)["choices"][0]["text"]
        wait_for(port, "kvtier_stored_chunks_total", WORDS // 128, tier="file")
    with serving(serve, variables, tmp_path, port):
        assert complete(port, str(model), PROMPT)["choices"][0]["text"] == first
        wait_for(port, "kvtier_hit_chunks_total", WORDS // 128)
    assert str(model) in run(look)
