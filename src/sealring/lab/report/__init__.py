"""Writes results as a page: one HTML file that opens offline and contains no script.

findings   what follows from the samples: overheads, splits, advice; and published figures
plots      one function for each picture: bars, and the same as numbers
page       the page as HTML
"""

from sealring.lab.report.page import headline, page, write_page

__all__ = ["headline", "page", "write_page"]
