"""The README's example of the Python API; `docs/generate.py` runs it and shows what it prints."""

import kvcli

with kvcli.load("demo", profile="ngram") as model:
    chat = model.chat()
    chat.attach(kvcli.read_document("demo:report"))
    turn = chat.send("What is the access code of depot Denvik?")
    print(turn.text)
    print(f"{turn.stats.new} tokens in {turn.stats.passes} passes")
