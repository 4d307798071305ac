"""How Sphinx builds the site: from stored outputs, without the web. `build.py` lays the sources out and calls it."""

project = "Many Hands"
html_title = "Many Hands"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["_build"]

nb_execution_mode = "off"  # pages show the outputs that are stored in the notebooks
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 3
# `!ls` and options behind a magic are no Python: such a cell is shown without colours
suppress_warnings = ["misc.highlighting_failure", "mystnb.lexer"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/favicon.svg"
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # from a disk a browser may not fetch the pages for it
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_exclude = ".linenos, .gp, .go"
