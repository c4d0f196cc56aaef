from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier, kvtier_json
from support.live import Live, live
from support.workloads import generate

from kvtier_sdk import TierSpec
from kvtier_sdk.cli.engine import ask
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
CHUNK = 1 << 20
#: A month of 30 days, to which ``kvtier plan`` scales the trace.
MONTH_S = 30 * 86_400
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
#: Measures the drawings, and shows the result as the page's title.
_SCRIPT = """<script>
const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1;
const found = {drawings: 0, clipped: [], height: document.body.scrollHeight};
for (const svg of document.querySelectorAll("svg")) {
  found.drawings += svg.getBoundingClientRect().height > 100;
  for (const text of svg.querySelectorAll("text"))
    if (!inside(text.getBoundingClientRect(), svg.getBoundingClientRect()))
      found.clipped.push(text.textContent);
}
document.title = JSON.stringify(found);
</script>"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    numbers: dict[bytes, int] = {}
    lines = [
        {
            "timestamp": 1000 * request.arrived_s,
            "hash_ids": [numbers.setdefault(key, len(numbers)) for key in request.keys],
            "chunk_bytes": CHUNK,
        }
        for request in generate("pauses", 1500, 1)
    ]
    path = tmp_path_factory.mktemp("plan") / "<b>trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def prices(path: Path, *tiers: str, accelerator: float = 3.0) -> Path:
    path.write_text(f"accelerator_hour = {accelerator}\nmemory_month = 2.5\n" + "".join(tiers))
    return path


def tier(url: str, **more: float) -> str:
    written = "".join(f"{name} = {of}\n" for name, of in more.items())
    of = 'month = 0.1\nlatency = "1ms"\nbandwidth = "1GB"\n'
    return f'[[tiers]]\nurl = "{url}"\n{of}{written}'


def plan(trace: Path, *words: str | Path) -> dict[str, Any]:
    return kvtier_json("plan", "--trace", trace, "--recompute", "40ms", *words)


def test_its_figures_follow_from_the_flow(tmp_path: Path, trace: Path) -> None:
    requests = trace.read_text().splitlines()
    asked = sum(len(json.loads(line)["hash_ids"]) for line in requests)
    wear = tier("memory:", full_writes=1000, replacement=0.2, million_puts=5, million_gets=1)
    paid = prices(tmp_path / "prices.toml", wear)
    found = plan(trace, "--prices", paid, "--all")
    # A forecast ignores the start of the trace, so the totals agree only roughly.
    total, asked = asked, found["without"]["first_token_s"] * len(requests) / 0.04
    assert asked == pytest.approx(total, rel=0.1)
    months = MONTH_S / len(requests)
    assert found["without"]["hit_rate"] == 0
    assert found["without"]["computing"] == pytest.approx(asked * 0.04 / 3600 * 3 * months)
    options = found["options"]
    assert any(of["tier_bytes"] for of in options)
    for of in options:
        misses = asked * (1 - of["hit_rate"])
        assert of["computing"] == pytest.approx(misses * 0.04 / 3600 * 3 * months)
        loads = asked * (of["hit_rate"] - of["pool_hit_rate"])
        work_s = misses * 0.04 + loads * CHUNK / 1e9 + min(loads, len(requests)) * 1e-3
        assert of["first_token_s"] == pytest.approx(work_s / len(requests))
        storing = of["pool_bytes"] / 2**30 * 2.5
        if of["tier_bytes"]:
            puts, gets = of["written_bytes"] / CHUNK, (loads + misses) / len(requests) * 86_400
            assert of["requests"] == pytest.approx(puts + gets)
            storing += of["tier_bytes"] / 2**30 * 0.1 + (5 * puts + gets) * 30 / 1e6
            storing += of["written_bytes"] * 30 / 1000 / 2**30 * 0.2
            years = 1000 * of["tier_bytes"] / of["written_bytes"] / 365
            assert of["life_years"] == pytest.approx(years)
        assert of["storing"] == pytest.approx(storing)
    # Without --all, an option is hidden if a cheaper option reaches the first token as fast.
    cheapest = min(options, key=lambda of: of["storing"] + of["computing"])
    best = plan(trace, "--prices", paid)
    assert best["suggested"] == cheapest
    firsts = [of["first_token_s"] for of in best["options"]]
    assert firsts == sorted(firsts, reverse=True)
    assert len(firsts) < len(options)


def test_prices_decide(tmp_path: Path, trace: Path) -> None:
    cheap, dear = (
        plan(trace, "--prices", prices(tmp_path / "prices.toml", tier("memory:"), accelerator=of))
        for of in (0.001, 1000.0)
    )
    assert dear["suggested"]["hit_rate"] > cheap["suggested"]["hit_rate"] + 0.1
    assert dear["suggested"]["tier_bytes"] > 0
    limited = plan(trace, "--memory", "512MiB")
    assert {of["pool_bytes"] for of in limited["options"]} <= {2**28, 2**29}


def test_a_compressing_tier_holds_and_writes_more_chunks(tmp_path: Path, trace: Path) -> None:
    paid = prices(tmp_path / "prices.toml", tier("memory:"))
    words = ("--all", "--prices", paid)
    plain, twice = (
        {
            (of["pool_bytes"], of["tier_bytes"]): of
            for of in plan(trace, *words, "--compression-ratio", ratio)["options"]
        }
        for ratio in ("1", "2")
    )
    place = next(place for place in plain if place[1] and (place[0], 2 * place[1]) in plain)
    larger = plain[place[0], 2 * place[1]]
    assert twice[place]["hit_rate"] == larger["hit_rate"] > plain[place]["hit_rate"]
    assert twice[place]["written_bytes"] == pytest.approx(larger["written_bytes"] / 2)
    assert TierSpec.from_url(twice[place]["url"]).runner.compress == "always"
    assert TierSpec.from_url(plain[place]["url"]).runner.compress == "never"


def test_a_tier_whose_server_has_the_limit_is_priced(tmp_path: Path, trace: Path) -> None:
    url = "redis://cache:6379/0"
    paid = prices(tmp_path / "prices.toml", tier(url), accelerator=1000.0)
    best = plan(trace, "--prices", paid)["suggested"]
    assert (best["tier"], best["url"]) == ("redis", url)
    assert best["tier_bytes"] > 0


def test_the_suggested_configuration_passes_the_check(tmp_path: Path, trace: Path) -> None:
    paid = prices(
        tmp_path / "prices.toml", tier(f"file://{tmp_path}/kv", full_writes=1000), accelerator=100.0
    )
    written, page = tmp_path / "kv.toml", tmp_path / "plan.html"
    words = ("--prices", paid, "--memory", "256MiB", "--write", written, "--report", page)
    done = kvtier("plan", "--trace", trace, "--recompute", "40ms", *words)
    assert (done.returncode, done.stderr) == (0, "")
    checked = kvtier("check", written)
    assert checked.returncode == 0, checked.stdout
    assert "tier 'file': ok" in checked.stdout
    assert done.stdout.endswith(written.read_text())
    (command,) = (line for line in done.stdout.splitlines() if "vllm-config" in line)
    words = shlex.split(command.partition(" > ")[0])
    vllm = tmp_path / "kv.json"
    vllm.write_text(kvtier(*words[1:]).stdout)
    checked = kvtier("check", vllm)
    assert checked.returncode == 0, checked.stdout
    sizes = [float(of) for of in re.findall(r"capacity=(\d+)", vllm.read_text())]
    assert sizes == [TierSpec.from_url(f"memory:?capacity={sizes[0]:.0f}").config.capacity_bytes]
    check_page(page.read_text(), done.stdout)


def check_page(written: str, printed: str) -> None:
    assert re.findall(r'@import|\b(?:src|href)="(?!data:).*|\bfetch\(', written) == []
    assert "<h1>Plan for &lt;b&gt;trace.jsonl</h1>" in written
    rows = [
        re.split(r" {2,}", line)
        for line in printed.splitlines()
        if re.search(r"\d (years|days) ", line)
    ]
    assert rows
    hits, costs, first, wrote = (
        [title.text or "" for title in ET.fromstring(svg).iter("title")]
        for svg in re.findall(r"<svg.*?</svg>", written, re.DOTALL)
    )
    assert len(hits) == len(costs) == len(first) == len(wrote) > 2
    for row in rows:
        for cell in row:
            assert f">{html.escape(cell.strip())}<" in written
    assert "Suggested" in written


def test_the_example_prices_are_a_file_for_prices(tmp_path: Path, trace: Path) -> None:
    example = tmp_path / "prices.toml"
    example.write_text(kvtier("plan", "--example-prices").stdout)
    words = ("plan", "--trace", trace, "--recompute", "40ms")
    default = kvtier(*words)
    assert default.returncode == 0, default.stderr
    assert kvtier(*words, "--prices", example).stdout == default.stdout


def test_bad_input_is_one_clear_line(tmp_path: Path, trace: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text('{"hash_ids": [1], "chunk_bytes": 64}\n')
    odd = tmp_path / "odd.json"
    odd.write_text('{"measured": [{"operation": "load"}]}')
    words, stuck = tmp_path / "words.json", tmp_path / "stuck.json"
    row = {"operation": "load", "backend": "file", "p50_s": 0.1, "bytes_per_s": "1GB"}
    words.write_text(json.dumps({"measured": [row]}))
    stuck.write_text(json.dumps({"measured": [row | {"bytes_per_s": 0}]}))
    free = tmp_path / "free.toml"
    free.write_text("accelerator_hour = 0\nmemory_month = 1\n")
    misspelt = tmp_path / "misspelt.toml"
    misspelt.write_text("acelerator_hour = 1\nmemory_month = 1\naccelerator_hour = 1\n")
    common = ("--recompute", "40ms")
    known = ("--trace", str(trace), *common)
    cases = {
        "no.jsonl: No such file": ("--trace", "no.jsonl", *common),
        "--recompute: give the time": ("--trace", str(trace)),
        "all at one time": ("--trace", str(one), *common),
        "'40' has no unit": ("--trace", str(trace), "--recompute", "40"),
        "no policy 'lrv'; did you mean 'lru'": (*known, "--policy", "lrv"),
        "--memory: the longest request needs a pool of": (*known, "--memory", "1MiB"),
        f"{free}: option 'accelerator_hour'": (*known, "--prices", str(free)),
        "did you mean 'accelerator_hour'": (*known, "--prices", str(misspelt)),
        "odd.json: is not what 'kvtier bench --json' prints": (*known, "--devices", str(odd)),
        "words.json: is not what": (*known, "--devices", str(words)),
        "stuck.json: is not what": (*known, "--devices", str(stuck)),
    }
    for message, arguments in cases.items():
        done = kvtier("plan", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr


def serve(engine: Live, workload: Sequence[ReplayRequest]) -> None:
    manager = engine.manager
    for of in workload:
        request = engine.begin(of.request_id)
        while True:
            hits, is_waiting = manager.lookup_prefix(of.keys, request)
            if not is_waiting:
                break
            engine.step()
        engine.load(request, *of.keys[:hits])
        engine.store(request, *of.keys[hits:])
        manager.on_request_finished(request)


def wait_for_the_recording(engine: Live, socket: Path, requests: int) -> None:
    for _ in range(3000):
        if ask(socket, {"command": "status"})["trace"]["written_requests"] == requests:
            return
        engine.step()
    raise AssertionError("the recording is not complete")


def test_a_plan_beside_what_its_engine_has_counted(tmp_path: Path) -> None:
    (line,) = re.findall("^    kvtier (plan .*--compare .*)", PAGE.read_text(), re.MULTILINE)
    *words, source = shlex.split(line)
    socket, recorded = tmp_path / source, tmp_path / words[2]
    workload = chat_workload(260, 2)

    def compare(source: str, *more: str) -> tuple[int, str]:
        done = kvtier(*words, source, "--policy", "lru", *more, cwd=tmp_path)
        return done.returncode, done.stdout or done.stderr

    options = {"admin_socket": str(socket), "trace_dir": str(recorded)}
    tier_url = "memory:?capacity=1800KiB&admission=off"
    with live([tier_url], slots=120, policy="lru", **options) as engine:
        serve(engine, workload[:160])
        wait_for_the_recording(engine, socket, 160)
        status, printed = compare(source)
        _, host, memory, verdict = printed.splitlines()
        assert (status, host.split()[0], memory.split()[0]) == (0, "host", "memory")
        assert verdict.startswith("The plan holds: ")
        counted = ask(socket, {"command": "status"})
        assert counted["tiers"][0]["evicted_chunks"] > 0
        asked = sum(len(of.keys) for of in workload[:160])
        found = json.loads(compare(source, "--json")[1])
        assert (found["holds"], found["lost"]) == (True, {})
        for row, of in zip(found["tiers"], (counted["host"], *counted["tiers"]), strict=True):
            assert of["hit_chunks"] > 0
            assert row["hit_rate"] == pytest.approx(of["hit_chunks"] / asked)
            assert row["forecast_hit_rate"] == pytest.approx(row["hit_rate"], abs=0.01)
        assert row["written_bytes"] == pytest.approx(row["forecast_written_bytes"], rel=0.05)

        assert kvtier("drain", socket, "memory").returncode == 0
        serve(engine, workload[160:])
        wait_for_the_recording(engine, socket, 260)
        printed = compare(source)[1]
        assert "The plan does not hold. Furthest from the forecast: " in printed
        assert "Most lost chunks: memory dropped store.drained (" in printed
        (whole,) = recorded.iterdir()
        whole.write_text("".join(whole.read_text().splitlines(keepends=True)[:40]))
        status, printed = compare(source)
        assert (status, printed.count("\n")) == (2, 1)
        assert "give its whole recording" in printed


@pytest.mark.reader
def test_the_pages_commands_run_as_they_stand(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "conversation.jsonl").write_bytes(trace.read_bytes())
    section = PAGE.read_text().partition("## Plan")[2].partition("## Play")[0]
    commands = re.findall(r"^    (kvtier (?:.*\\\n)*.*)", section, re.MULTILINE)
    assert len(commands) >= 4
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = "\n".join(["set -e", *commands]).replace("/data/", f"{tmp_path}/")
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Suggested: pool of" in done.stdout
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    assert kvtier("check", "--no-dry-run", tmp_path / "kv.toml").returncode == 0


def measured(page: str, directory: Path) -> dict[str, Any]:
    """Return a page's drawings, clipped texts and height, as measured in the browser."""
    assert BROWSER is not None
    copy = directory / "measured.html"
    # The page's content security policy forbids scripts.
    copy.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page) + _SCRIPT)
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900", "--dump-dom"]
    done = subprocess.run(
        [BROWSER, *words, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    (title,) = re.findall(r"<title>(.*?)</title>", done.stdout)
    found: dict[str, Any] = json.loads(title)
    return found


@pytest.mark.reader
@pytest.mark.skipif(BROWSER is None, reason="make browser installs chromium")
def test_a_browser_shows_all_of_the_page(tmp_path: Path, trace: Path) -> None:
    page, drawing = tmp_path / "plan.html", tmp_path / "bench.svg"
    plan(trace, "--report", page)
    found = measured(page.read_text(), tmp_path)
    assert (found["drawings"], found["clipped"]) == (4, [])
    kvtier("bench", "memory:", "--total", "384MiB", "--rounds", "1", "--plot", drawing)
    found = measured(f"<!doctype html><title></title>{drawing.read_text()}", tmp_path)
    assert (found["drawings"], found["clipped"]) == (1, [])
