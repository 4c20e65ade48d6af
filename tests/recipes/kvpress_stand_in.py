"""Speaks the lines of kvpress_worker.py without kvpress or a model: token i of an answer is prompt + i."""

import json
import os
import sys

for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if number == 0:
        refused = asked["press"] == "TOVAPress"
        answer = {"error": "ValueError: no such press\nmore"} if refused else {"ready": {"kvpress": "0"}}
        answer |= {"asked": asked}
    elif asked["prompt"] == [13]:
        print("out of memory, says the system", file=sys.stderr)
        os._exit(9)
    elif asked["prompt"] == [7]:
        answer = {"error": "AssertionError: too short"}
    else:
        ids = [asked["prompt"][-1] + i + 1 for i in range(asked["new"])]
        answer = {"ids": ids, "at": [0.5 * (i + 1) for i in range(len(ids))], "kv_bytes": 96, "peak_bytes": 4096}
    print(json.dumps(answer), flush=True)
