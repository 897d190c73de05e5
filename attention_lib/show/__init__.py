"""Pictures: functions from numbers to a figure, in one visual language.

Every figure is shown through `figure`, which will not show one without words for it.
"""

from attention_lib.show.source import show_source
from attention_lib.show.style import COLOURS, HATCHES, MARKERS, figure, new_figure

__all__ = ["COLOURS", "HATCHES", "MARKERS", "figure", "new_figure", "show_source"]
