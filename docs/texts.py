"""The example of docs/python.md: several texts over one model; `docs/generate.py` runs it and shows what it prints."""

import asyncio

import kvcli
from kvcli.api import End, Text

with kvcli.load("demo", profile="exact") as model:
    with model.open() as a, model.open(profile="ngram") as b:
        for task in kvcli.generate_together(a.answer("Hello"), b.answer("Thank you!")):
            print(task.result().text)

    async def reply(question: str) -> int:
        async with model.open() as text:
            async for event in text.astream(question):
                if isinstance(event, Text):
                    ...  # to the browser: event.text
                elif isinstance(event, End):
                    return event.turn.stats.new

    async def serve() -> None:
        print(await asyncio.gather(reply("Hello"), reply("Thank you!")), "tokens")

    asyncio.run(serve())
