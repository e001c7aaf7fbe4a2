"""The reports of runs: complete, self-contained, well-formed, and deaf to what is written in the data."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table as RichTable

from securefl.crypto.ckks_terms import COLLUSION
from securefl.report import claims, digest, page
from securefl.report.render import (
    accuracy_table,
    departures_table,
    plain_table,
    write_comparison_report,
    write_run_report,
)
from securefl.result import ClientRow, Difference, Result, SumRow
from tests.samples import EXACT, SILOS, make_result, make_results, noised

TRAINING: dict[str, Any] = {
    "mechanism": "dp-sgd",
    "epsilon": 7.992,
    "delta": 2e-5,
    "noise_multiplier": 0.58239,
    "sample_rate": 0.0625,
    "steps": 64,
    "clip": 1.25,
    "head_share": 0.5,
    "sampling": "poisson",
    "per_unit": 3,
    "accountants": "prv (opacus 1.6.0), checked by pld (dp-accounting 0.6.0)",
    "unit": "row",
    "adjacency": "add-remove",
    "generator": "aes-256-ctr keyed by the operating system",
    "simulated": False,
}
COUNTS = {
    "mechanism": "gaussian-counts",
    "epsilon": 1.0,
    "delta": 2e-5,
    "mu": 0.3,
    "noise_multiplier": 3.3,
    "unit": "row",
    "adjacency": "add-remove",
    "generator": "numpy.PCG64(seed)",
    "simulated": True,
}
NOTICE = {"mechanism": "independent", "reason": "that the last model arrived, and no figure"}
SILO_NOISE = {"mechanism": "distributed-discrete-gaussian", "epsilon": 3.0, "delta": 1e-5, "unit": "silo",
              "adjacency": "replace-one"}  # fmt: skip
VOID = {"meta", "br", "link", "img", "hr", "input"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&[red]bold[/red]"
OVERRIDE = "safe\u202egnp.exe\x1b[31m\x00\ud800"


class Page(HTMLParser):
    """The tags, attributes and text of a page; raises on a tag that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def check(path: Path) -> Page:
    """What holds for every page this package writes."""
    raw = path.read_text(encoding="utf-8")
    # Nothing to fetch, nothing to run, whatever the attribute is called.
    assert "http://" not in raw
    assert "https://" not in raw
    assert not re.search(r"url\((?!#)|@import", raw)
    parsed = Page(raw)
    names = {name for name, _ in parsed.tags}
    assert not names & {
        "script",
        "iframe",
        "object",
        "embed",
        "img",
        "link",
        "base",
        "form",
        "audio",
        "video",
    }
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "an identifier twice"
    for name, attributes in parsed.tags:
        assert not [
            key for key in attributes if key.startswith("on") or key in ("src", "srcset", "action")
        ], name
        for key in ("href", "xlink:href"):
            value = attributes.get(key)
            assert value is None or (value.startswith("#") and value[1:] in ids), (name, value)
    # Accessible: one h1, a caption for every table, words for every figure, nothing hidden from a keyboard.
    assert [name for name, _ in parsed.tags].count("h1") == 1
    assert [name for name, _ in parsed.tags].count("table") == [name for name, _ in parsed.tags].count(
        "caption"
    )
    pictures = [attributes for _, attributes in parsed.tags if attributes.get("role") == "img"]
    assert all(attributes["aria-label"] for attributes in pictures)
    assert len(pictures) == len(re.findall("<svg", raw))
    csp = next(a["content"] for n, a in parsed.tags if n == "meta" and "http-equiv" in a)
    assert csp is not None
    assert csp.startswith("default-src 'none'")
    for svg in re.findall(r"<svg.*?</svg>", raw, flags=re.DOTALL):
        ElementTree.fromstring(svg)  # noqa: S314 (our own output)
    return parsed


def numbers_of(result: Result) -> set[str]:
    """Every number of a result, written as the report writes it."""
    found = {page.duration(result.seconds), page.size(result.peak_memory_bytes), f"{result.test_rows:,}"}
    if result.difference is not None:
        ends = result.difference.interval
        found |= {page.signed(x) for x in (result.difference.value, *ends)}
    for row in result.rounds:
        found |= {page.duration(row.seconds), page.size(row.bytes_up), page.size(row.bytes_down)}
    for client in result.clients:
        shares = (client.test_accuracy, client.baseline_accuracy, *client.test_interval)
        found |= {f"{share:.3f}" for share in shares}
        found |= {f"{client.train_rows:,}", f"{client.validation_rows:,}", page.size(client.bytes_up)}
        found |= {f"{rows:,}" for rows in client.labels.values()}
        found |= {page.epsilon(e) for e in (client.epsilon, client.private_epsilon) if e is not None}
        found |= {page.size(release.bytes) for release in client.releases}
        found |= {
            page.epsilon(r.claim["epsilon"])
            for r in client.releases
            if r.claim["mechanism"] == "gaussian-sums"
        }
    server = result.server
    shares_of_server = (
        server.test_accuracy,
        server.nlu_accuracy,
        server.nlg_accuracy,
        server.nlu_accuracy_before,
        server.nlg_judged,
        server.nlg_judged_before,
        *(value for a in server.arrivals for value in (a.kl, a.agreement, a.self_bleu, a.distinct_2)),
    )
    found |= {f"{x:.3f}" for x in (*shares_of_server, *server.kl) if x is not None}
    found |= {f"{x:.2f}" for x in (server.perplexity_before, server.perplexity_after) if x is not None}
    for a in server.arrivals:
        found |= {a.note} if a.note else set()
        found |= {f"{a.mean_words:.1f}"} if a.mean_words is not None else set()
        found |= {f"{x.usable_share:.2f} → {x.kept_share:.2f}" for x in a.per_label.values()}
    return found


@pytest.mark.parametrize("result", make_results(), ids=lambda result: result.name)
def test_every_number_of_a_result_is_on_its_page(tmp_path: Path, result: Result) -> None:
    write_run_report(result, tmp_path / "report.html")
    parsed = check(tmp_path / "report.html")
    missing = {number for number in numbers_of(result) if number not in parsed.text}
    assert not missing
    for client in result.clients:
        assert client.name in parsed.text
        for release in client.releases:
            assert any(release.sha256 in attributes.values() for _, attributes in parsed.tags)
            assert release.claim.get("reason", "") in parsed.text
    assert result.run in parsed.text


def test_a_comparison_has_the_numbers_of_all_runs(tmp_path: Path) -> None:
    results = make_results()
    write_comparison_report(results, tmp_path / "report.html", title="Four silos")
    parsed = check(tmp_path / "report.html")
    for result in results:
        assert result.name in parsed.text
        assert not {number for number in numbers_of(result) if number not in parsed.text}, result.name
    assert "Four silos" in parsed.text
    shown = sum(result.difference is not None and result.difference.within_noise for result in results)
    # Once in the list of runs and once beside the accuracies, as a badge each time.
    assert (tmp_path / "report.html").read_text().count(
        '<span class="badge caution">within noise</span>'
    ) == 2 * shown
    # At most twenty of the 26 synthetic texts.
    assert parsed.text.count("desk reports that") == 20
    assert "20 of 26 texts" in parsed.text
    assert "tensor head holds NaN; refused" in parsed.text


def test_simulated_noise_is_marked_beside_the_epsilon(tmp_path: Path) -> None:
    write_run_report(make_result(), tmp_path / "report.html")
    raw = (tmp_path / "report.html").read_text()
    assert re.search(r"ε 7\.85 to 7\.88</bdi> <span class=\"badge caution\">simulated</span>", raw)
    assert "no finite epsilon" in raw


def test_the_summary_says_who_could_read_what() -> None:
    first, second, third = digest.summary(make_results())
    assert "trains alone reaches a mean accuracy of 0.700" in first  # (.712 + .655 + .690 + .741) / 4 = .6995
    assert "fedkc-embeddings gains most: 0.764" in first
    assert "fedkc-pooled-dp and crosslm" in first
    assert "Nothing left a silo in standalone." in second
    assert "In every run but standalone, the server could read trained weights and scores." in second
    assert "In fedkc-pooled and fedkc-pooled-dp, the other silos could read group averages" in second
    assert "at most ε 7.88 at δ = 1e-5 (simulated" in second
    assert third == "This was not measured here."


def test_a_run_that_shares_nothing_says_so(tmp_path: Path) -> None:
    alone = make_results()[0]
    write_run_report(alone, tmp_path / "report.html")
    assert "Nothing left any silo." in check(tmp_path / "report.html").text
    assert digest.total_claim(alone.clients[0]) == "nothing left"


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    matplotlib.rcParams["font.size"] = 31  # somebody's own settings
    write_comparison_report(make_results(), tmp_path / "a.html")
    matplotlib.rcParams["font.size"] = matplotlib.rcParamsDefault["font.size"]
    write_comparison_report(make_results(), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def hostile_result() -> Result:
    """A result whose every string came from somebody who does not wish us well."""

    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {(f"{HOSTILE}{k}" if key == "labels" else k): poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(entry, key) for entry in value]
        fixed = key in ("schema", "mechanism", "error", "outcome")
        return (
            value
            if fixed or not isinstance(value, str)
            else f"{HOSTILE}{OVERRIDE}😀 שלום {value} {'x' * 5000}"
        )

    document = poison(make_results()[-1].model_dump(by_alias=True))
    document["clients"][0]["training"] = poison({**TRAINING, "unit": "patient_id", "epsilon": 7.99})
    document["clients"][1]["name"] = "שלום 😀 漢字 $x^2$ \\frac{1}{2} _leading"
    return Result.model_validate(document)


def test_hostile_strings_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for several in (False, True):
        if several:
            write_comparison_report([hostile_result(), make_result()], path, title=HOSTILE)
        else:
            write_run_report(hostile_result(), path)
        parsed = check(path)
        raw = path.read_text(encoding="utf-8")
        assert "<script" not in raw
        assert "<img" not in raw
        assert "&lt;script&gt;alert(1)" in raw
        assert not set(raw) & {"\u202e", "\x1b", "\x00"}
        assert "שלום 😀 漢字" in parsed.text
        assert max(len(word) for word in parsed.text.split()) < 600


def test_a_cut_string_ends_in_an_ellipsis_and_stays_short() -> None:
    assert page.clean("a" * 50, 10) == "a" * 9 + "…"
    assert page.clean("a\n\tb  c") == "a b c"
    assert page.clean("\u202eabc\x07\u2066") == "\ufffdabc\ufffd\ufffd"


@given(st.text(max_size=80), st.integers(1, 40))
def test_clean_never_exceeds_its_limit_nor_leaves_a_control(text: str, limit: int) -> None:
    cleaned = page.clean(text, limit)
    assert len(cleaned) <= limit
    assert cleaned.encode("utf-8").decode("utf-8") == cleaned
    assert not any(
        ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or "\u202a" <= char <= "\u202e" for char in cleaned
    )
    assert page.clean(cleaned, limit) == cleaned


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (page.size(0), "0 B"),
        (page.size(999), "999 B"),
        (page.size(1000), "1.0 kB"),
        (page.size(999_400), "999 kB"),
        (page.size(999_600), "1.0 MB"),
        (page.size(86_400_000), "86.4 MB"),
        (page.size(518_531_844), "519 MB"),
        (page.size(2_500_000_000_000), "2.5 TB"),
        (page.signed(-0.0004), "0.000"),
        (page.signed(-0.0415), "−0.042"),
        (page.signed(0.02), "+0.020"),
        (page.epsilon(7.849), "7.85"),
        (page.epsilon(0.001), "< 0.01"),
        (page.epsilon(0.0), "0.00"),
        (page.delta(1e-5), "1e-5"),
        (page.delta(0.25), "0.25"),
        (page.accuracy(None), "–"),
        (page.duration(12.34), "12.3 s"),
        (page.duration(125), "2 min 05 s"),
        (page.duration(3725), "1 h 02 min"),
        (digest.number_ranges([3, 1, 2, 5, 5]), "1 to 3, 5"),
        (page.listing(["a"]), "a"),
        (page.listing([]), ""),
        (page.listing(["a", "b", "c"]), "a, b and c"),
        (page.listing(["a", "b", "c"], 1), "a and 2 more"),
    ],
)
def test_numbers_and_lists_are_written_as_agreed(shown: str, expected: str) -> None:
    assert shown == expected


def test_readers_are_told_apart() -> None:
    assert digest.parties(["server"], "silo-1", SILOS) == "the server"
    assert digest.parties(["silo-2", "silo-3", "silo-4"], "silo-1", SILOS) == "the other silos"
    assert digest.parties(["silo-2", "silo-3"], "silo-1", SILOS) == "some of the other silos"
    assert (
        digest.parties(["silo-2", "silo-3", "silo-4", "server"], "silo-1", SILOS)
        == "the server and the other silos"
    )
    assert digest.parties(["mallory"], "silo-1", SILOS) == "mallory"
    assert digest.parties([], "silo-1", SILOS) == "nobody"


def test_a_kind_with_one_exact_release_has_no_finite_epsilon() -> None:
    result = make_result()
    client = result.clients[0]
    spoiled = [
        r if r.kind != "centroids" or r.round != 3 else r.model_copy(update={"claim": EXACT})
        for r in client.releases
    ]
    changed = result.model_copy(
        update={"clients": [client.model_copy(update={"releases": spoiled}), *result.clients[1:]]}
    )
    pooled = next(d for d in digest.departures(changed) if d.kind == "centroids")
    assert pooled.reasons == (EXACT["reason"],)
    assert pooled.claim() == "ε 7.88 simulated; no finite epsilon"
    assert (pooled.releases, pooled.bytes, pooled.rounds) == (8, 8 * 9_876, "2 to 3")


def test_equal_headers_become_one_and_rows_keep_their_number() -> None:
    table = page.Table("t", ("a", "b"), (("x", "1"), ("x", "2"), ("y", "3"), ("x", "4")))
    assert [span for span, _ in table.cells()] == [2, 0, 1, 1]


def test_a_comparison_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one result"):
        write_comparison_report([], tmp_path / "report.html")


def test_a_figure_name_cannot_break_out_of_its_identifiers() -> None:
    with pytest.raises(ValueError, match="letters, digits and hyphens"):
        page.draw('x" onload="', 1, 1, lambda _: None)


def test_a_plain_string_in_place_of_a_figure_is_escaped() -> None:
    picture = page.Picture("<svg onload=alert(1)></svg>", "words", "caption")  # type: ignore[arg-type]
    raw = page.render_page("t", "s", [page.Section("h", (picture,))], "f").decode()
    assert "<svg" not in raw


@pytest.mark.parametrize("silos", [1, 12, 40])
def test_few_and_many_silos_and_labels(tmp_path: Path, silos: int) -> None:
    result = make_result()
    clients = [
        result.clients[0].model_copy(
            update={"name": f"silo-{i + 1}", "labels": {f"label-{j}": j + 1 for j in range(i % 30 + 1)}}
        )
        for i in range(silos)
    ]
    many = result.model_copy(update={"clients": clients})
    write_comparison_report([many, many.model_copy(update={"name": "again"})], tmp_path / "report.html")
    parsed = check(tmp_path / "report.html")
    assert f"silo-{silos}" in parsed.text


# --- the terminal


def printed(table: RichTable) -> str:
    console = Console(width=100, file=None, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_terminal_tables_fit_a_hundred_columns() -> None:
    results = make_results()
    for table in (accuracy_table(results), departures_table(results)):
        lines = printed(table).splitlines()
        assert max(len(line) for line in lines) <= 100
        assert not any("…" in line for line in lines)
    text = printed(accuracy_table(results))
    row = next(line for line in text.splitlines() if "fedkc-pooled-dp" in line)
    assert row.split() == [
        "fedkc-pooled-dp",
        "0.742",
        "0.715",
        "0.710",
        "0.741",
        "0.727",
        "+0.028",
        "~",
    ]
    assert "~: within noise" in text
    other = results[1].difference
    assert other is not None
    compared = [results[0], results[1].model_copy(update={"against": {"first": other}})]
    text = printed(accuracy_table(compared))
    assert "against first" in text
    cells = next(line for line in text.splitlines() if compared[1].name in line).split()
    assert cells.count(f"{other.value:+.3f}") == 2
    text = printed(departures_table(results))
    assert re.search(r"pooled averages +the other silos +8 +79\.0 kB +ε 7\.88 simulated", text)
    assert re.search(r"standalone +nothing", text)
    assert "δ = 1e-5" in text


def test_terminal_tables_of_many_silos_give_the_range() -> None:
    result = make_result()
    clients = [
        result.clients[0].model_copy(update={"name": f"s{i}", "test_accuracy": i / 100})
        for i in range(50, 70)
    ]
    text = printed(accuracy_table([result.model_copy(update={"clients": clients})]))
    assert "0.500" in text
    assert "0.690" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_terminal_tables_show_markup_and_controls() -> None:
    text = printed(
        plain_table("[b]t[/b]", [("[red]h", False)], [["[red]x[/red]"], ["\x1b[31mred\x07"], ["[/]"]])
    )
    assert "[b]t[/b]" in text
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "[/]" in text
    hostile = printed(departures_table([hostile_result()])) + printed(accuracy_table([hostile_result()]))
    assert "\x1b" not in hostile
    assert "\u202e" not in hostile


def test_difference_reads_better_worse_or_within_noise(tmp_path: Path) -> None:
    def shown(value: float, ends: tuple[float, float], within: bool) -> str:
        difference = Difference(value=value, interval=ends, within_noise=within)
        write_run_report(make_result(difference=difference), tmp_path / "report.html")
        return (tmp_path / "report.html").read_text()

    assert '<span class="badge good">better</span>' in shown(0.05, (0.01, 0.09), False)
    assert '<span class="badge bad">worse</span>' in shown(-0.05, (-0.09, -0.01), False)
    assert '<span class="badge caution">within noise</span>' in shown(0.01, (-0.01, 0.03), True)


def _sums(**changes: Any) -> Result:
    fields = {
        "round": 1,
        "protection": "masked",
        "opened_by": ["server"],
        "silos": list(SILOS[:3]),
        "threshold": 3,
        "rows": 4321,
        "resolution": 3.2e-7,
        "claim": EXACT,
        "sha256": "ab" * 32,
        **changes,
    }
    return make_result().model_copy(update={"sums": [SumRow.model_validate(fields)]})


def test_opened_sums_say_by_whom_and_over_whom(tmp_path: Path) -> None:
    text = _page(_sums(), tmp_path)
    for part in (
        "Sums that were opened",
        "the server",
        "silo-1, silo-2 and silo-3",
        "3 of 4",
        "4,321",
        "3.2e-07",
    ):
        assert part in text
    assert "Noise" not in text.split("Sums that were opened")[1].split("Why there is")[0]
    assert "The server opened sums of masked weights" in text


def test_noise_and_faults_have_a_column_where_there_are_some(tmp_path: Path) -> None:
    text = _page(_sums(rows=None, noise=0.015, faults=["silo-2 gave a bad share of silo-3"]), tmp_path)
    for part in ("hidden", "1.5e-02", "silo-2 gave a bad share of silo-3"):
        assert part in text


def test_encrypted_sums_state_the_limit_of_their_key(tmp_path: Path) -> None:
    text = _page(_sums(protection="ckks", opened_by=list(SILOS), threshold=0), tmp_path)
    for part in ("every silo", "not enforced", COLLUSION):
        assert part in text


def _page(result: Result, folder: Path) -> str:
    write_run_report(result, folder / "page.html")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", html.unescape((folder / "page.html").read_text())))


# --- differential privacy in training


def private_result(
    method: str = "fedkc", metrics: dict[str, Any] = COUNTS, name: str = "private", **scope: Any
) -> Result:
    """A run in which weights left under DP-SGD, centroids with noise and scores under `metrics`."""
    training = {**TRAINING, **scope}
    by_kind: dict[str, dict[str, Any]] = {
        "model": training,
        "centroids": {**noised(), **scope},
        "metrics": {**metrics, **(scope if metrics is COUNTS else {})},
    }
    result = make_result(name, method)

    def private(client: ClientRow) -> ClientRow:
        releases = [r.model_copy(update={"claim": by_kind[r.kind]}) for r in client.releases]
        total = {"epsilon": 9.41, "private_epsilon": 9.41, "delta": 2e-5} if releases else {}
        return client.model_copy(
            update={**total, "releases": releases, "training": training, "no_finite_epsilon": []}
        )

    return result.model_copy(
        update={"clients": [private(client) for client in result.clients], "method": method}
    )


def test_every_term_of_dp_sgd_is_on_the_page(tmp_path: Path) -> None:
    text = _page(private_result(unit="patient_id"), tmp_path)
    table = text.split("Training by DP-SGD: private")[1].split("Of each silo.")[0]
    for fact in (
        "ε 7.99 at δ = 2e-5",
        "one patient (patient_id) with all its rows of a silo, there or not (add-remove)",
        "at most 3",
        "poisson: each patient_id takes part in a step with probability 0.0625; 64 steps",
        "L2 norm 1.25",
        "0.5824: standard deviation over clip",
        "aes-256-ctr keyed by the operating system",
        "prv (opacus 1.6.0), checked by pld (dp-accounting 0.6.0)",
    ):
        assert fact in table
    assert "simulated" not in table, "noise of the operating system is none"
    for word, _ in (("DP-SGD", ""), ("Clip", ""), ("Noise multiplier", ""), ("Unit", "")):
        assert word in text.split("Words used here")[2]
    plain = _page(private_result(), tmp_path)
    assert "Rows of one" not in plain
    assert "Holds for one row, there or not (add-remove)" in plain


def test_the_silos_total_says_what_it_holds_and_for_whom(tmp_path: Path) -> None:
    text = _page(private_result(), tmp_path)
    assert (
        "3 trainings by DP-SGD, 3 releases of noised scores and 2 releases of noised group averages, "
        "composed by their privacy loss distributions." in text
    )
    assert "private, for one row, there or not:" in text
    assert "ε 9.41 at δ = 2e-5" in text
    assert "for one row, there or not." in digest.summary([private_result()])[1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ""),
        ([EXACT, NOTICE], ""),
        ([EXACT, noised()], "1 release of noised group averages"),
        ([noised(), COUNTS], "as one Gaussian mechanism, without a loss"),
        ([TRAINING, TRAINING], "2 trainings by DP-SGD, composed by their privacy loss distributions"),
        ([noised(), SILO_NOISE], "as zero-concentrated DP"),
        ([TRAINING, SILO_NOISE], "each at half of δ, and added"),
    ],
)
def test_composition_in_words(given: list[dict[str, Any]], words: str) -> None:
    """As `account` composes: Gaussian ones exactly, with zCDP as zCDP, trainings by loss distributions."""
    client = make_result().clients[0]
    first = client.releases[0]
    releases = [first.model_copy(update={"claim": claim}) for claim in given]
    said = claims.composed(client.model_copy(update={"releases": releases}))
    assert said.endswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({}, "one row, there or not"),
        ({"adjacency": "replace-one"}, "one row, exchanged for another"),
        ({"unit": "patient_id"}, "one patient (patient_id) with all its rows of a silo, there or not"),
        ({"unit": "ward"}, "one ward with all its rows of a silo, there or not"),
        (
            {"unit": "case_file_id", "adjacency": "replace-one"},
            "one case file (case_file_id) with all its rows of a silo, exchanged for another",
        ),
    ],
)
def test_the_terminal_names_the_unit_and_adjacency_of_the_claims(scope: dict[str, Any], words: str) -> None:
    text = " ".join(printed(departures_table([private_result(**scope)])).split())
    assert f"of all its noised releases, for {words}, at δ = 2e-5" in text
    assert "trained without noise and under no claim" not in text


def test_runs_with_different_units_are_told_apart() -> None:
    both = [private_result(name="rows"), private_result(name="patients", unit="patient_id")]
    text = " ".join(printed(departures_table(both)).split())
    assert "for one row, there or not (rows); one patient (patient_id) with all its rows of a silo," in text
    assert digest.whose(both).endswith("there or not (patients)")


def test_claims_on_whole_silos_cover_the_units_they_are_composed_with() -> None:
    result = private_result()
    client = result.clients[0]
    noisy = client.releases[0].model_copy(update={"claim": SILO_NOISE})
    alone = client.model_copy(update={"releases": [noisy], "training": None})
    assert claims.scopes(result.model_copy(update={"clients": [alone]})) == ["a silo's whole data"]
    mixed = alone.model_copy(update={"releases": [noisy, client.releases[2]]})
    assert claims.scopes(result.model_copy(update={"clients": [mixed]})) == ["one row, there or not"]


def test_weights_under_no_claim_have_a_warning_and_others_none(tmp_path: Path) -> None:
    fedavg = make_result("fedavg", "fedavg", shared=None, noise=False)
    warning = "Weights without a bound."
    assert warning in _page(fedavg, tmp_path)
    assert "under no claim" in " ".join(printed(departures_table([fedavg])).split())
    assert warning not in _page(private_result(), tmp_path)
    summed = private_result().model_copy(update={"sums": _sums().sums})
    assert warning in _page(summed, tmp_path), "a sum under no claim tells of rows too"
    write_comparison_report([fedavg, private_result()], tmp_path / "both.html")
    assert "Weights left in fedavg trained without noise" in check(tmp_path / "both.html").text


def test_scores_are_noised_exact_or_none(tmp_path: Path) -> None:
    text = _page(private_result(), tmp_path)
    assert "In private the silos told the server numbers of right answers, with noise." in text
    assert re.search(
        "scores +the server +12 .*ε 9.41 simulated", printed(departures_table([private_result()]))
    )
    quiet = private_result(metrics=NOTICE)
    text = _page(quiet, tmp_path)
    assert "In private no silo told a score." in text
    assert "Notices without a score" in text
    assert "could read scores" not in digest.summary([quiet])[1]
    assert re.search("notices, no score +the server +12 .*of no row", printed(departures_table([quiet])))
    assert "told exact scores" not in _page(make_result(), tmp_path), "said only beside another way"


def test_alone_is_without_noise_where_training_is_private(tmp_path: Path) -> None:
    """The mean of the samples' baselines is .6995; of their accuracies under DP-SGD .752."""
    first = digest.summary([private_result()])[0]
    assert "A silo that trains alone, without noise, reaches a mean accuracy of 0.700." in first
    assert "alone with as many local passes and no noise" in first
    text = _page(private_result(), tmp_path)
    assert "also holds what privacy costs" in text
    assert "nothing exchanged, no noise" in text
    assert "alone: without noise" in printed(accuracy_table([private_result()]))
    for plain in (_page(make_result(), tmp_path), printed(accuracy_table([make_result()]))):
        assert "what privacy costs" not in plain


def test_models_that_never_left_still_have_a_bound(tmp_path: Path) -> None:
    alone = private_result("standalone")
    assert not any(client.releases for client in alone.clients)
    first, second, _ = digest.summary([alone])
    assert "without noise, reaches a mean accuracy of 0.700. Alone and by DP-SGD, in private, it" in first
    assert second == (
        "Nothing left any silo. The models of private have ε 7.99 at δ = 2e-5 for one row, there or not; "
        "none of them left its silo."
    )
    text = " ".join(printed(departures_table([alone])).split())
    assert "the models of private have ε 7.99 at δ = 2e-5 for one row, there or not; none left" in text
    assert "Training by DP-SGD: private" in _page(alone, tmp_path)


def test_a_silo_that_dropped_out_is_marked_beside_its_accuracy(tmp_path: Path) -> None:
    result = make_results()[-1]
    assert result.rounds[-1].dropped == ["silo-3"]
    text = printed(accuracy_table([result]))
    accuracies = [f"{client.test_accuracy:.3f}" for client in result.clients]
    row = next(line for line in text.splitlines() if "crosslm" in line).split()
    assert row[1:6] == [*accuracies[:3], "†", accuracies[3]]
    assert "†: dropped out of the last round" in text
    shown = _page(result, tmp_path)
    assert re.search(r"0\.720 † ?0\.674 to 0\.763", shown)
    assert "†: dropped out of the last round, so its model is of an earlier one (silo-3 in round 3" in shown
    earlier = result.model_copy(update={"rounds": result.rounds[:2]})
    assert "†" not in printed(accuracy_table([earlier]))
    many = [result.clients[0].model_copy(update={"name": f"silo-{i}"}) for i in range(3, 20)]
    text = printed(accuracy_table([result.model_copy(update={"clients": many})]))
    assert "†" in text


def test_no_number_of_rows_travels_with_private_weights(tmp_path: Path) -> None:
    assert "the number of rows that travels" in _page(make_result(), tmp_path)
    text = _page(private_result(), tmp_path)
    assert "the number of rows that travels" not in text
    assert "This report is outside it too" in text


def test_fewer_centroids_than_clusters_and_patients_of_several_silos_are_said() -> None:
    """Hand-made results: 4 clusters, of which one silo shared 1 and then 3; two patients in two silos."""
    rows = [private_result().clients[0].releases[0]] * 2
    noised = {"mechanism": "gaussian-sums", "epsilon": 1.0}
    releases = [
        row.model_copy(update={"kind": "centroids", "claim": noised, "centroids": number, "round": number})
        for row, number in zip(rows, (3, 1), strict=True)
    ]
    result = private_result()
    first, *others = result.clients
    result = result.model_copy(
        update={
            "config": {"fedkc": {"clusters": 4}, "data": {"unit": "patient_id"}},
            "clients": [first.model_copy(update={"releases": releases}), *others],
            "shared_units": 2,
        }
    )
    few, shared = claims.cautions(result)
    assert few.startswith(f"Of 4 clusters' centroids these silos shared, at the least: {first.name} 1; ")
    assert "nearest of public texts" in few
    assert shared.startswith("2 values of patient_id in rows of more than one silo")
    whole = [row.model_copy(update={"centroids": 4}) for row in releases]
    kept = first.model_copy(update={"releases": whole})
    assert claims.cautions(result.model_copy(update={"clients": [kept, *others], "shared_units": 0})) == []
