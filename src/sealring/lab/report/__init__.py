"""Results as a page: one HTML file that opens offline, without a script in it.

findings   what follows from the samples: overheads, splits, what to change; what others published
drawing    matplotlib's SVG in the page's own colours, light and dark, for desk and phone
plots      one function per picture
page       all of it as HTML
"""

from sealring.lab.report.page import headline, page, write_page

__all__ = ["headline", "page", "write_page"]
