"""The proxy: reads an SLO off each request, holds it in policy order, binds it late to pods, measures TTFT.

Pure decisions live in `slo`, `ordering`, `placement`, `revisions`, `legs`, `merge`, `assemble` and `outcome`;
effects in `dispatcher`, `pods`, `upstream`, `discovery`, `live`, `exchange`, `app` and `main`. Nothing here imports
torch or transformers.
"""
