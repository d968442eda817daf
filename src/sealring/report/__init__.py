"""Results as a page: one HTML file that opens offline, without a script in it.

published  what others measured, and where that is written
findings   what follows from the samples: overheads, splits, what to change
drawing    matplotlib's SVG in the page's own colours, light and dark, for desk and phone
plots      one function per picture; those of machines and of GPUs apart
page       all of it as HTML
"""

from sealring.report.page import headline, page, write_page

__all__ = ["headline", "page", "write_page"]
