"""Write a report from an analysis: sections as data, figures, and one page. No statistics."""
