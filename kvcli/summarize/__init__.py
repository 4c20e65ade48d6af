"""Summarize long documents, with checked citations.

    with kvcli.load("demo") as model:
        for event in summarize(model, [read_document("report.pdf")]):
            ...

Nothing here prints; `kvcli summarize` displays the events.
"""
