"""The pictures on which the demo model is trained, and those that are held out."""

from __future__ import annotations

from random import Random

import demo_styles as styles


def test_training_draws_no_look_and_no_font_of_the_test() -> None:
    random = Random(0)
    drawn = {styles.training_look(random, [styles.DEFAULT_FONT])[:3] for _ in range(3000)}
    assert len(styles.HELD_OUT_LOOKS) == 10
    assert not drawn & set(styles.HELD_OUT_LOOKS.values())
    assert len(drawn) == 7 * 4 * 2 - 10
    families = [
        {pair for pairs in fonts.values() for pair in pairs}
        for fonts in (styles.FONTS, styles.HELD_OUT_FONTS)
    ]
    assert not families[0] & families[1]
