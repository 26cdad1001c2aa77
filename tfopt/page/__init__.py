"""Charts and a self-contained HTML page for reporting measurements.

The page opens from disk, without scripts or anything loaded from elsewhere. It follows the reader's light or dark
scheme, and works in print and on a phone. Apart from the ticks of time charts, all numbers come from the caller.

Example:
    >>> chart = bar_chart(
    ...     [
    ...         Bar("float32", 1.0, "1.00×", tone="baseline"),
    ...         Bar("mixed_bfloat16", 2.31, "2.31× (2.24–2.37)", low=2.24, high=2.37, tone="better"),
    ...     ],
    ...     title="Speed of a training step",
    ...     description="Against float32, with the 95 % interval.",
    ...     reference=1.0,
    ...     reference_label="as fast as float32",
    ... )
    >>> page = Page("Benchmark", "Mixed precision pays off here.", [Section("Precision", charts=[chart])])
    >>> html = render(page)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
