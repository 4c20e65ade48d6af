"""Long documents to summaries whose citations were checked.

    with kvcli.load("demo") as model:
        for event in summarize(model, [read_document("report.pdf")]):
            ...

Nothing here prints; `kvcli summarize` is a skin over the events.
"""
