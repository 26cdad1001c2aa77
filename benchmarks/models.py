"""Every tool of tfopt on models that others designed: whether they train as without it.

    python benchmarks/models.py [RESULTS.json] [--only MODEL ...] [--tool TOOL ...] [--budget SECONDS]
    python benchmarks/models.py [RESULTS.json] --page

Each model is trained in a process of its own, without tfopt and with each tool, as `model_cases/tools.py` describes.
Each cell goes into RESULTS.json (default: benchmarks/results/models-cpu.json) as soon as it is known, and the table
into docs/models.md. A second run goes on with the cells that are missing, unless versions have changed; `--only` and
`--tool` run theirs again. With `--page` nothing runs, and the page is filled.

Its environment is tfopt's with KerasHub, without tensorflow-text, which would choose the version of TensorFlow:

    pip install . && pip install --no-deps keras-hub && pip install tokenizers sentencepiece regex kagglehub
"""

from model_cases.table import main

if __name__ == "__main__":
    main(__doc__)
