"""Judge a session at its end: from the rows that a rank compared to the errors that all ranks of its group raise."""
