"""The page shows published figures, no ratio of noise, and nothing that runs or is fetched."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sealring.cli import app
from sealring.errors import ConfigurationError
from sealring.lab.report import page
from sealring.lab.report.findings import changes, overheads, pairs
from sealring.lab.results import Results, write_results
from tests.lab.report.examples import whole, with_gpu

NO_PLOTS: dict[str, Any] = {"aead": [], "link": [], "step": [], "scale": []}


def noisy() -> Results:
    """Makes sealed steps that scatter around the plain ones."""
    plain, sealed = [case for case in whole().step if case.run == 4 and case.variant != "cc"]
    scattered = [0.7, 1.3, 0.8, 1.25, 1.0, 0.9, 1.1, 0.75, 1.2]
    return whole(
        aead=[],
        link=[],
        step=[
            dataclasses.replace(plain, seconds=[0.1] * 9),
            dataclasses.replace(
                sealed, seconds=[0.1 * each for each in scattered], split=[], timeline=[]
            ),
        ],
    )


def test_the_published_figures_stand_behind_ours(html: str) -> None:
    for figure in ("8.68", "41.6", "3.03", "arXiv 2501.11771"):
        assert figure in html
        assert figure not in html[: html.index("</p>", html.index('class="lead"'))]
    assert re.search(r"a sealed training step takes <b>1\.0\d to 1\.\d\d times</b> the plain", html)


def test_the_own_result_leads_where_no_step_was_measured(tmp_path: Path) -> None:
    """The lead once had only other people's figures."""
    results = whole(step=[])
    lead = lead_of(results)
    assert re.search(
        r"a sealed collective takes <b>\d\.\d\d( to \d+\.\d\d)? times</b> the pl", lead
    )
    assert "41.6" not in lead
    assert lead_of(whole(step=[], allreduce=[], collectives=[])).startswith("No training step was")


def test_the_command_says_the_own_result(tmp_path: Path) -> None:
    write_results(tmp_path / "mine.json", whole())
    out = str(tmp_path / "page.html")
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "mine.json"), "-o", out])
    assert done.exit_code == 0
    first, last = done.stdout.splitlines()
    assert re.search(r"mine\.json: On this machine a sealed training step takes 1\.0\d to", first)
    assert last == f"{out} is written; open it in a browser."


def test_a_gpus_measurements_stand_beside_their_bars(html: str) -> None:
    said = re.search(r"(\d+) of (\d+) measurements reach their bar", html)
    assert said is not None
    assert (said[1], said[2]) == ("12", "14")  # Gloo is not twice as slow, with 2 ranks or with 4
    assert "all_reduce 256 MiB, 4 ranks, peer: NCCL" in html
    assert 'id="gpu-roofline"' in html
    assert 'id="gpu"' not in page(whole())


def test_what_forming_groups_costs_is_told_by_their_size(html: str) -> None:
    assert 'id="forming"' in html
    assert "works 16 ms to form a group of 16 and 112 ms for one of 256" in html
    assert "1.0 TLS handshakes a rank" in html
    for scale in ([], whole().scale[:3]):  # one number of ranks gives no line
        assert 'id="forming"' not in page(whole(scale=scale))


def test_noise_is_called_noise_and_gets_no_ratio() -> None:
    [only] = overheads(noisy())
    assert only.against_plain.only_noise
    html = page(noisy())
    assert "too noisy to tell sealed from plain" in html
    assert f"only noise (±{only.against_plain.noise:.0%})" in html
    assert f"{only.against_plain.ratio:.3f}" not in html


def lead_of(results: Results) -> str:
    found = re.search(r'class="lead">(.*?)</p>', page(results))
    assert found is not None
    return found[1]


def test_the_headline_counts_the_settings_that_are_noise() -> None:
    clear = [case for case in whole().step if case.run == 8 and case.variant in ("plain", "sealed")]
    lead = lead_of(dataclasses.replace(noisy(), step=[*clear, *noisy().step]))
    assert re.search(r"takes <b>1\.\d\d times</b> the plain one in 1 of 2 settings", lead), lead
    assert "too noisy to tell (±" in lead
    alone = lead_of(dataclasses.replace(noisy(), step=clear))
    assert "settings" not in alone
    assert f"({clear[0].model}, {clear[0].ranks} ranks)" in alone


def advice_for(features: list[str], openssl: str, architecture: str = "x86_64") -> str:
    machine = dataclasses.replace(
        whole().machine, architecture=architecture, features=features, openssl=openssl
    )
    texts = [each.what for each in changes(whole(factor=3.0, machine=machine))]
    (text,) = [each for each in texts if each.startswith("Seal faster")]
    return text


def test_advice_on_sealing_knows_the_cpu_and_its_openssl() -> None:
    wide = ["aes", "vaes", "vpclmulqdq", "avx512f"]
    assert "a CPU with vector AES" in advice_for(["aes"], "OpenSSL 3.0.15")
    unused = advice_for(wide, "OpenSSL 3.0.15")
    assert "this CPU has vector AES (VAES), which OpenSSL 3.0.15 does not use" in unused
    used = advice_for(wide, "OpenSSL 3.5.4")
    assert "in use already" in used
    for text in (unused, used, advice_for(["aes", "pmull"], "OpenSSL 3.0.15", "aarch64")):
        assert "a CPU with" not in text


def test_no_kernel_is_above_its_roof() -> None:
    faster = [
        dataclasses.replace(case, seconds=[each / 9 for each in case.seconds])
        if case.kernel == "reduce"
        else case
        for case in whole().aead
    ]
    for results in (whole(), whole(aead=faster), with_gpu()):
        tables = re.findall(r'id="(?:gpu-)?roofline".*?</section>', page(results))
        shares = re.findall(r"<td>(\d+)%</td></tr>", "".join(tables))
        assert shares
        assert max(map(int, shares)) <= 100, shares


def test_one_thing_has_one_name(html: str) -> None:
    text = re.sub(r"<[^>]*>", " ", html)
    assert "GPU-TEE path" in text
    assert not re.search(r"\bCC\b", text)


def test_published_figures_are_text_and_do_not_set_the_scale_of_the_bars(html: str) -> None:
    section = html[html.index('id="overhead"') :]
    section = section[: section.index("</section>")]
    picture = section[: section.index("<figcaption>")]
    drawn = re.findall(r">([\d.]+)×<", picture)
    assert drawn
    assert max(map(float, drawn)) < 8
    assert "41.6" in section[section.index("<figcaption>") :]


def test_nothing_runs_and_nothing_is_fetched(html: str) -> None:
    assert "<script" not in html
    assert "Content-Security-Policy" in html
    outside = set(re.findall(r"""(?:src|href)=["']?(?!#)([^"'\s>]+)""", html))
    assert outside == set()
    assert re.findall(r"https?://[^\"'\s<]+", html) == []
    assert len(html) < 1 << 20


def test_ids_are_unique_and_references_lead_to_them(html: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for name in re.findall(r'(?:href="#|url\(#)([^")]+)', html):
        assert name in ids


def test_what_a_file_says_is_text_and_nothing_else() -> None:
    evil = "<img src=x onerror=alert(1)> $\\frac{1}{2}$ \"'&"
    steps = [dataclasses.replace(case, model=evil) for case in whole().step[:6]]
    html = page(whole(aead=[], link=[], step=steps, command=evil, stopped=evil, complete=False))
    assert "<img" not in html
    assert "&lt;img src=x" in html
    assert "This run is not complete" in html


@pytest.mark.parametrize(
    "empty",
    [
        NO_PLOTS,
        NO_PLOTS | {"allreduce": []},
        NO_PLOTS | {"step": [dataclasses.replace(each, seconds=[]) for each in whole().step[:3]]},
        NO_PLOTS | {"link": [dataclasses.replace(each, points=[]) for each in whole().link]},
        NO_PLOTS | {"aead": whole().aead[:1]},
    ],
    ids=["no plots", "nothing", "no samples", "no points", "no memory's rate"],
)
def test_a_page_of_less_is_a_page(empty: dict[str, Any]) -> None:
    html = page(whole(**empty))
    assert "What was measured, and how" in html


def test_a_better_bucket_is_named_with_its_gain() -> None:
    found = changes(whole())
    assert [change.gain for change in found] == sorted((c.gain for c in found), reverse=True)
    steps = [
        dataclasses.replace(case, seconds=[each * 2 for each in case.seconds])
        if case.variant == "sealed" and case.bucket_cap_mb == 25 and case.model == "mlp"
        else case
        for case in whole().step
    ]
    first = changes(whole(step=steps))[0]
    assert first.what.startswith("Give DDP bucket_cap_mb=")
    assert "mlp on 2 ranks" in first.what
    assert first.gain == pytest.approx(0.5, abs=0.05)


def test_two_results_are_compared_case_by_case() -> None:
    found = pairs(whole(), whole(seed=1, factor=0.5))
    sealed = [each for each in found if each.label.endswith("sealed") and "step" in each.label]
    assert len(sealed) == 12
    assert all(each.change.ratio == pytest.approx(0.51, abs=0.06) for each in sealed)
    plain = [each for each in found if each.label.endswith("plain")]
    assert all(not 0.9 < each.change.ratio < 1.1 or not each.change.only_noise for each in plain)


def test_results_without_a_common_case_say_so() -> None:
    other = whole(**NO_PLOTS, allreduce=[])
    assert "have no case in common" in page(whole(), other)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    results, out = tmp_path / "results.json", tmp_path / "report.html"
    write_results(results, whole(**NO_PLOTS))
    done = CliRunner().invoke(app, ["bench", "report", str(results), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text() == page(whole(**NO_PLOTS))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.html", "results.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.json"], "missing.json cannot be read: No such file or directory"),
        (["a", "b", "c"], "a page shows one or two results, and here are 3"),
    ],
)
def test_bad_arguments_get_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "report", *arguments])
    assert type(done.exception) is ConfigurationError
    assert sentence in str(done.exception)
    assert list(tmp_path.iterdir()) == []
