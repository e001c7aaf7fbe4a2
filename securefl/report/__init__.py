"""From `Result` objects to what people read: a self-contained HTML page, and tables for a terminal.

`render` holds the entry points; `digest` says things in words, `chapters`, `language` and `outflow` build the
sections, `figures` draws, and `page` is the only module that writes HTML. The auditor's report uses `page`
too.
"""
