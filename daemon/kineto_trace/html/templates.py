"""The templates of the pages."""

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined

from kineto_trace.base.visible_text import visible
from kineto_trace.html.charts import figure
from kineto_trace.html.documents import place, table_columns, titles, tree_levels, unit_text
from kineto_trace.view_api.cell_texts import gain, view_sentence, view_title


def environment(*loaders: BaseLoader) -> Environment:
    """Returns the templates of these loaders and those of results. Values are escaped; unknown names are errors."""
    made = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader("kineto_trace.html", "page")]),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,  # they do not change while a program runs
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        figure=figure,
        gain=gain,
        place=place,
        table_columns=table_columns,
        title=view_title,
        titles=titles,
        tree_levels=tree_levels,
        unit=unit_text,
        view_sentence=view_sentence,
        visible=visible,
    )
    return made
