"""How an axis alters a module."""

from torch import nn

from titan_like.parallel.extend import extend


class Twice(nn.Module):
    def forward(self, x):
        return 2 * super().forward(x)


class Plus(nn.Module):
    def forward(self, x):
        return super().forward(x) + self.summand


class Next(nn.Identity):
    def forward(self, x):
        return x + 1


def test_kinds_stack_in_order_and_modules_of_a_class_still_share_one():
    one, other = Next(), Next()
    for module in (one, other):
        extend(module, Twice)
        extend(module, Plus, summand=10)
    assert one(3) == 2 * (3 + 1) + 10
    assert type(one) is type(other) and isinstance(one, Next) and type(one).__name__ == "Next"
    assert Next()(3) == 4
