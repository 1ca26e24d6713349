"""Judge a session at its end: from the rows that a rank compared to the errors that all ranks of its group raise.

Limits, with the script that set each and that shows what a new value does. `faults` and `legal` are modes of
`python -m examples.effect.agreement`: 21 faults in four routers must raise (last run 2026-11-28), legal sessions of nine
models must not (2026-11-28). `equal` is `python -m examples.effect.equal_samples` (2026-11-28). All results are in
`benchmarks/RESULTS_agreement.md`; a limit that changes needs both modes again. "By hand" is a bound without a measurement.

    name                 value   guards                                                  set by
    min_agreement        0.25    a layer that agrees less raises                         faults, legal
    WARN                 0.5     a layer that agrees less warns                          legal
    LEAST_DECISIONS      128     a layer with less evidence does not raise               legal, its tiny batches
    LEAST_TO_WARN        64      nor warn below min_agreement, with less than this       permuted ids in the demo's reply
    EVIDENCE             72      a block of rows raises (legal sessions reach 69)        legal, faults
    ROW_EVIDENCE         6       what one row, or all rows of a kind, add to a block     legal, its loops
    SHARED_NOISE         15      what noise gives a rank's block of a shared sample      legal, TP4 and CP4
    LEAST_NOISE          0.02    no engine is taken to be more exact                     legal
    LEAST_CHANCE         0.02    no expert is taken to be rarer                          legal
    NOISE_ROWS           32      rows of a window in which noise is measured             faults
    NOISE_WINDOWS        8       windows that a weight version needs for its own noise   legal, mixed ages
    LEAST_APART          0.005   share of single rows outside that is noise              legal
    APART_NOISE          30      the same, as a multiple of what independent noise gives legal
    NUM_APART            20      fewer single rows outside are noise                     legal, its tiny batches
    EXPERT_NOISE         0.35    a right expert is outside no more often                 faults, physical ids
    EXPERT_EVIDENCE      20      an expert counts as wrong                               faults, physical ids
    MOST_CHANCE          0.5     no expert is taken to be more frequent                  faults, physical ids
    ALIKE_ROWS           8       rows of a kind that count in full for a layer           legal, answers of one token
    FEW_EXPERTS          600     the same, over experts squared, where experts are few   legal, 8 experts
    ONE_ROW              0.8     share of a block in one row that names a stale capture  faults, their texts
    CLEAR                0.6     share of a block that a cause must explain              faults, their texts
    CLEARLY_MORE         0.25    how much more than the next cause                       faults, their texts
    MOST_MOVED           128     tokens by which a moved stream is searched for          by hand
    MOST_EQUAL           1024    equal rows among which a source is searched for         by hand
    MOST_BLOCKS          256     blocks of a layer                                       by hand
    MOST_SHARED_BLOCKS   1024    blocks that a rank publishes                            by hand
    MOST_RANGES          4096    ranges of wrong rows that a rank publishes              by hand
    LOW_SHARE            0.9     a session that replays a smaller share warns            by hand
    _WINDOW              16      rows over which equal samples are compared              equal, images of 16 tokens
    _STEP                4       from window to window                                   equal
    _ALIKE               0.5     share of experts that equal inputs have in common       equal
    _FEW                 5       experts that are no evidence                            equal
    _FEW_DECISIONS       2       the same, in decisions, where topk is 3 or more         equal, top-8 of 128
    _MOST_WINDOWS        1024    windows compared at once                                by hand
"""
