"""Quality of answers with a compressed KV cache: generated tasks, compared with the full cache on the same samples.

from kvcli.quality.run import run_quality
result = run_quality(model, [profile], n=4)
print(result.document().rows[0].mean)
"""
