"""Results as a page: one HTML file that opens offline, without a script in it.

findings   what follows from the samples: overheads, splits, what to change; what others published
plots      one function per picture: bars, and the same as numbers
page       all of it as HTML
"""

from sealring.lab.report.page import headline, page, write_page

__all__ = ["headline", "page", "write_page"]
