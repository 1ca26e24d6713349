"""Trace rows of sequences of some lengths, laid out as a batch."""

from megatron_router_replay.layout.rows import PADDING_ROW, number_rows, pack_sequences, pad_sequences


def pad_rows(lengths, **options):
    return pad_sequences(number_rows(lengths), fill=PADDING_ROW, **options)


def pack_rows(lengths, **options):
    return pack_sequences(number_rows(lengths), fill=PADDING_ROW, **options)
