"""One table, as text."""

from megatron_router_replay.tables import Table, printable, share

TABLE = Table(
    head=("planet", "moons"),
    words=(0,),
    rows=(("Mars", "2"), ("Saturn", "274")),
)


def test_text_has_words_on_the_left_and_numbers_on_the_right_and_no_spaces_behind():
    assert TABLE.text() == "  planet  moons\n  Mars        2\n  Saturn    274"
    facts = Table(words=(0, 2), rows=(("a", "1", ""), ("bcd", "22", "(of 3)")))
    assert facts.text() == "  a     1\n  bcd  22  (of 3)"


def test_what_is_left_out_is_said_below_all_columns():
    table = Table(head=("a", "b"), rows=(("1", "2"),), left_out="7 <more>")
    assert table.text() == "  a  b\n  1  2\n  7 <more>"


def test_a_table_without_rows_prints_its_titles_or_nothing():
    assert Table(rows=()).text() == ""
    assert Table(head=("a",), rows=()).text() == "  a"


def test_cells_cannot_break_lines_or_colour_a_terminal():
    assert Table(rows=(("a\nb\x1b[31m",),)).text() == "  a\\nb\\x1b[31m"
    assert printable("\u202ex\ud800") == "\\u202ex\\ud800"


def test_a_share_of_nothing_is_a_dash():
    assert (share(1, 8), share(0, 0)) == ("12.50 %", "-")
