"""Colours for light and dark mode; no fonts or images from other servers."""

from __future__ import annotations

from typing import Final

PRIMARY: Final = "#0072B2"
"""Its contrast with white is 5.2 (WCAG AA requires 4.5)."""

CATEGORICAL: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C8C8C", "#B8A800")
"""Okabe and Ito's palette, distinguishable for the colour-blind (jfly.uni-koeln.de/color), with a darker
yellow and grey for black, so that both are visible on white and on black.
"""

SEQUENTIAL: Final = "Viridis"
"""Perceptually uniform and readable in every form of colour blindness (Smith and van der Walt, 2015)."""

DIVERGING: Final = "RdBu"
"""Red to blue through white, distinguishable in every form of colour blindness (ColorBrewer, Brewer 2003)."""

MARK: Final = "#FF2D55"
"""Outline of the selected cell, distinct from all colours of the maps, on white and on black."""

GAP: Final = "#9AA0A6"
"""Missing values: a neutral grey outside of the sequential map, visible on white and black."""

# In dark mode, white on the primary colour and the primary colour on the page (the value of a slider) both
# have a contrast of 4.5, which leaves no room for a lighter page. Violet is the colour of plain text, for
# `fmt.inked`.
_COLOURS = {
    "primaryColor": (PRIMARY, "#1B7BBF"),
    "backgroundColor": ("#FFFFFF", "#030507"),
    "secondaryBackgroundColor": ("#F4F6F8", "#11171E"),
    "textColor": ("#0C1118", "#E4E9EE"),
    "linkColor": ("#00639C", "#7CC0F0"),
    "borderColor": ("#DDE3E9", "#2B353F"),
    "codeTextColor": ("#0C1118", "#E4E9EE"),
    "codeBackgroundColor": ("#F4F6F8", "#11171E"),
    "grayBackgroundColor": ("#EEF1F4", "#1D252D"),
    "grayTextColor": ("#4E5965", "#AEB8C2"),
    "violetTextColor": ("#0C1118", "#E4E9EE"),
}
"""For light and dark mode."""


def theme_config() -> dict[str, object]:
    """Return the theme as options of Streamlit's configuration."""
    config: dict[str, object] = {
        "theme.baseRadius": "0.5rem",
        "theme.metricValueFontSize": "1.6rem",
        "theme.metricValueFontWeight": 600,
        "theme.headingFontSizes": ["1.9rem", "1.1rem", "1rem", "1rem", "0.9rem", "0.85rem"],
        "theme.headingFontWeights": [650, 600, 600, 600, 600, 600],
        "theme.paddingTop": "0.75rem",
        "theme.chartCategoricalColors": list(CATEGORICAL),
    }
    for place, mode in enumerate(("light", "dark")):
        config |= {f"theme.{mode}.{key}": colours[place] for key, colours in _COLOURS.items()}
    return config
