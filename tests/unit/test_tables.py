"""One table, as text and as HTML."""

from megatron_router_replay.tables import Table, printable, share

TABLE = Table(
    name="planets",
    head=("planet", "moons"),
    words=(0,),
    rows=(("Mars", "2"), ("<b>Saturn</b>", "274")),
)


def test_text_has_words_on_the_left_and_numbers_on_the_right_and_no_spaces_behind():
    assert TABLE.text() == "  planet         moons\n  Mars               2\n  <b>Saturn</b>    274"
    facts = Table(name="facts", words=(0, 2), rows=(("a", "1", ""), ("bcd", "22", "(of 3)")))
    assert facts.text() == "  a     1\n  bcd  22  (of 3)"


def test_html_escapes_every_cell():
    assert TABLE.html() == (
        '<table id="table-planets"><thead><tr><th style="text-align:left">planet</th><th style="text-align:right">moons</th>'
        '</tr></thead><tbody><tr><td style="text-align:left">Mars</td><td style="text-align:right">2</td></tr>'
        '<tr><td style="text-align:left">&lt;b&gt;Saturn&lt;/b&gt;</td>'
        '<td style="text-align:right">274</td></tr></tbody></table>'
    )


def test_what_is_left_out_is_said_below_all_columns():
    table = Table(name="few", head=("a", "b"), rows=(("1", "2"),), left_out="7 <more>")
    assert table.text() == "  a  b\n  1  2\n  7 <more>"
    assert '<tfoot><tr><td colspan="2">7 &lt;more&gt;</td></tr></tfoot>' in table.html()


def test_a_table_without_rows_prints_its_titles_or_nothing():
    assert Table(name="none", rows=()).text() == ""
    assert Table(name="none", head=("a",), rows=()).text() == "  a"
    assert "<tbody></tbody>" in Table(name="none", rows=()).html()


def test_cells_cannot_break_lines_or_colour_a_terminal():
    assert Table(name="x", rows=(("a\nb\x1b[31m",),)).text() == "  a\\nb\\x1b[31m"
    assert printable("\u202ex\ud800") == "\\u202ex\\ud800"


def test_a_share_of_nothing_is_a_dash():
    assert (share(1, 8), share(0, 0)) == ("12.50 %", "-")
