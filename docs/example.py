"""The README's example of the Python API; `docs/generate.py` runs it and shows what it prints."""

import kvcli

# without "adaptive" it drafts at every chance, so the count below is the same on every machine
with kvcli.load("demo", profile="ngram", set={"spec.adaptive": False}) as model:
    chat = model.chat()
    chat.attach(kvcli.read_document("demo:report"))
    turn = chat.send("What is the stock of depot Gimness?")
    print(turn.text)
    print(f"{turn.stats.new} tokens in {turn.stats.passes} passes")
