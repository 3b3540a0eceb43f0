"""Measure pictures, for tests."""

from matplotlib.figure import Figure


def cut_off(figure: Figure) -> float:
    """Return how many inches of the drawing lie beyond the picture's edge."""
    figure.draw_without_rendering()
    drawn, page = figure.get_tightbbox(), figure.bbox_inches
    over = (page.x0 - drawn.x0, drawn.x1 - page.x1, page.y0 - drawn.y0, drawn.y1 - page.y1)
    return max(0.0, *over)
