"""The pictures on which the demo model is trained: where their texts are, and what is held out."""

from __future__ import annotations

from random import Random

import demo_styles as styles
import numpy as np

from batchkit.commands.demo_tables import make_table, texts


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


def test_each_text_is_in_its_box_and_its_letters_are_spelled() -> None:
    random, seen = Random(1), 0
    for _ in range(40):
        table = make_table(random, (3, 2))
        look = styles.training_look(random, [styles.DEFAULT_FONT])
        size = styles.natural_size(random, table, look)
        picture = styles.draw_look(random, table, look, size)
        if picture is None:
            continue
        seen += 1
        assert picture.pixels.shape == (size[1], size[0])
        for box in picture.boxes[1:].round().astype(int):
            inside = picture.pixels[box[1] : box[3], box[0] : box[2] + 1]
            assert np.ptp(inside) > 60, look
        spelled = "".join(chr(int(code)) for code in picture.letters[:, 3])
        assert spelled.endswith("".join(text for line in texts(table)[1:] for text in line))
    assert seen > 20
