"""The rewrite rules of the prover, in egglog's syntax, each with the shapes it is certified on.

A rule is `left = right` under conditions; its variables are the words that are no constructors. The
same text is run by egglog and evaluated on random tensors (`trnc.equiv.certify`), so what is
certified is what is used. Rules of arithmetic are also proved by SMT.

`draw` names each variable's kind, with sizes drawn anew each time: a letter is one size in a rule.
Of kinds between `|` one is drawn; some break a condition, so that a rule that lacks it would fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

SCHEMA = """
(sort Dims (Vec String))
(sort Order (Vec i64))
(datatype* (Term
    (In i64) (Lit BigRat) (Map String Term) (Zip String Term Term) (Where Term Term Term)
    (Reshape Term Dims) (Permute Term Order) (Slice Term i64 i64 i64) (Cat i64 Term Term)
    (Expand Term Dims) (Reduce String Term i64) (Matmul Term Term) (Norm Term Term Term)
    (Attend String Term Terms Terms) (Op String Terms Terms) (Get Term i64)
    (Row Term) (Item Terms i64))
  (Terms (Nil) (Cons Term Terms) (Rows Terms) (At Terms Terms)))
(function shape (Term) Dims :merge old)
(relation commutes (String))
(relation associates (String))
(relation linear (String))
(commutes "add") (commutes "mul") (commutes "max") (commutes "min")
(commutes "and") (commutes "or") (commutes "eq")
(associates "add") (associates "mul") (associates "max") (associates "min")
(associates "and") (associates "or")
(ruleset rules)
(ruleset directed)
(ruleset shapes)
"""

# What is known of the shapes of new terms. A wrong one could only make a rule's condition hold, so
# these are certified with the rules.
SHAPES = """
(rule ((= t (Reshape x s))) ((set (shape t) s)) :ruleset shapes)
(rule ((= t (Expand x s))) ((set (shape t) s)) :ruleset shapes)
(rule ((= t (Map f x)) (= s (shape x))) ((set (shape t) s)) :ruleset shapes)
(rule ((= t (Zip f x y)) (= s (shape x)) (= s (shape y))) ((set (shape t) s)) :ruleset shapes)
(rule ((= t (Zip f x y)) (= s (shape x)) (= 0 (vec-length (shape y)))) ((set (shape t) s))
  :ruleset shapes)
(rule ((= t (Zip f x y)) (= s (shape y)) (= 0 (vec-length (shape x)))) ((set (shape t) s))
  :ruleset shapes)
(rule ((= t (Where c x y)) (= s (shape c)) (= s (shape x)) (= s (shape y))) ((set (shape t) s))
  :ruleset shapes)
(rule ((= t (Slice x d a b)) (= s (shape x))) ((set (shape t) (vec-set s d (to-string (- b a)))))
  :ruleset shapes)
(rule ((= t (Reduce f x d)) (= s (shape x))) ((set (shape t) (vec-set s d "1"))) :ruleset shapes)
(rule ((= t (Permute x p)) (= s (shape x)) (= 2 (vec-length p)))
  ((set (shape t) (vec-of (vec-get s (vec-get p 0)) (vec-get s (vec-get p 1))))) :ruleset shapes)
(rule ((= t (Permute x p)) (= s (shape x)) (= 3 (vec-length p)))
  ((set (shape t) (vec-of (vec-get s (vec-get p 0)) (vec-get s (vec-get p 1))
    (vec-get s (vec-get p 2))))) :ruleset shapes)
(rule ((= t (Row x)) (= s (shape x)) (> (vec-length s) 0)) ((set (shape t) (vec-set s 0 "1")))
  :ruleset shapes)
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """`left = right` where all of `when` hold; `both` also rewrites right to left.

    `directed` rules only ever make a graph simpler, so they are run to the end before the others.
    """

    name: str
    left: str
    right: str
    draw: str
    when: tuple[str, ...] = ()
    both: bool = False
    directed: bool = False

    def commands(self) -> Iterator[str]:
        """Yield the rule as egglog's."""
        yield self._command(self.left, self.right, self.name)
        if self.both:
            yield self._command(self.right, self.left, f"{self.name}{BACK}")

    def _command(self, left: str, right: str, name: str) -> str:
        conditions = f" :when ({' '.join(self.when)})" if self.when else ""
        ruleset = "directed" if self.directed else "rules"
        rewrite = f'(rewrite {left} {right}{conditions} :ruleset {ruleset} :name "{name}")'
        return with_constants(rewrite)


BACK = ", from right to left"
_CONSTANTS = {"ZERO": 0, "ONE": 1, "TWO": 2, "MINUS": -1}


def with_constants(text: str) -> str:
    """Spell the numbers that rules name as egglog's exact rationals."""
    for name, value in _CONSTANTS.items():
        text = text.replace(name, f'(bigrat (from-string "{value}") (from-string "1"))')
    return text


_SAME = "(= (shape x) (shape y))"
_SCALAR = "(= 0 (vec-length (shape k)))"

ARITHMETIC = (
    Rule("commute", "(Zip f x y)", "(Zip f y x)", "x:f[A,B] y:f[A,B] f:name", ("(commutes f)",)),
    Rule(
        "associate",
        "(Zip f (Zip f x y) z)",
        "(Zip f x (Zip f y z))",
        "x:f[A,B] y:f[B] z:f[A,1] f:name",
        ("(associates f)",),
        both=True,
    ),
    Rule(
        "distribute",
        '(Zip "mul" x (Zip "add" y z))',
        '(Zip "add" (Zip "mul" x y) (Zip "mul" x z))',
        "x:f[A,1] y:f[A,B] z:f[A,B]",
        both=True,
    ),
    Rule("fold sum", '(Zip "add" (Lit a) (Lit b))', "(Lit (+ a b))", "a:q b:q"),
    Rule("fold product", '(Zip "mul" (Lit a) (Lit b))', "(Lit (* a b))", "a:q b:q"),
    Rule("fold inverse", '(Map "inv" (Lit a))', "(Lit (/ ONE a))", "a:q", ("(!= a ZERO)",)),
    Rule("add zero", '(Zip "add" x (Lit ZERO))', "x", "x:f[A,B]"),
    Rule("times one", '(Zip "mul" x (Lit ONE))', "x", "x:f[A,B]"),
    Rule("twice", '(Zip "add" x x)', '(Zip "mul" (Lit TWO) x)', "x:f[A,B]", both=True),
    Rule(
        "collect one",
        '(Zip "add" x (Zip "mul" (Lit a) x))',
        '(Zip "mul" (Lit (+ a ONE)) x)',
        "x:f[A,B] a:q",
    ),
    Rule(
        "collect",
        '(Zip "add" (Zip "mul" (Lit a) x) (Zip "mul" (Lit b) x))',
        '(Zip "mul" (Lit (+ a b)) x)',
        "x:f[A,B] a:q b:q",
    ),
    Rule("cancel", '(Zip "add" (Zip "mul" (Lit ZERO) x) y)', "y", "x:f[A,B] y:f[A,B]", (_SAME,)),
    Rule(
        "inverse of a product",
        '(Map "inv" (Zip "mul" x y))',
        '(Zip "mul" (Map "inv" x) (Map "inv" y))',
        "x:p[A,B] y:p[A,B]",
        both=True,
    ),
    Rule("inverse twice", '(Map "inv" (Map "inv" x))', "x", "x:p[A,B]"),
    Rule(
        "max by where",
        '(Zip "max" x y)',
        '(Where (Zip "lt" x y) y x)',
        "x:f[A,B] y:f[A,B]",
        both=True,
    ),
    Rule(
        "min by where",
        '(Zip "min" x y)',
        '(Where (Zip "lt" x y) x y)',
        "x:f[A,B] y:f[A,B]",
        both=True,
    ),
    Rule(
        "min by max",
        '(Zip "min" x y)',
        '(Zip "mul" (Lit MINUS) (Zip "max" (Zip "mul" (Lit MINUS) x) (Zip "mul" (Lit MINUS) y)))',
        "x:f[A,B] y:f[A,B]",
    ),
    Rule("not twice", '(Map "not" (Map "not" c))', "c", "c:b[A,B]"),
    Rule(
        "not and",
        '(Map "not" (Zip "and" c e))',
        '(Zip "or" (Map "not" c) (Map "not" e))',
        "c:b[A,B] e:b[A,B]",
        both=True,
    ),
    Rule("where not", '(Where (Map "not" c) x y)', "(Where c y x)", "c:b[A,B] x:f[A,B] y:f[A,B]"),
    Rule(
        "where flipped",
        "(Where c x y)",
        '(Where (Map "not" c) y x)',
        "c:b[A,B] x:f[A,B] y:f[A,B]",
    ),
    Rule(
        "where alike",
        "(Where c x x)",
        "x",
        "c:b[A,B] x:f[A,B]",
        ("(= (shape c) (shape x))",),
    ),
    Rule(
        "where in where",
        "(Where c (Where c x y) z)",
        "(Where c x z)",
        "c:b[A,B] x:f[A,B] y:f[A,B] z:f[A,B]",
        ("(= (shape c) (shape z))",),
    ),
    Rule(
        "where both",
        "(Where c (Where e x y) y)",
        '(Where (Zip "and" c e) x y)',
        "c:b[A,B] e:b[A,B] x:f[A,B] y:f[A,B]",
        both=True,
    ),
    Rule(
        "zip out of where",
        "(Where c (Zip f x k) (Zip f y k))",
        "(Zip f (Where c x y) k)",
        "c:b[A,B] x:f[A,B] y:f[A,B] k:f[A,B] f:name",
        both=True,
    ),
    Rule(
        "map out of where",
        "(Where c (Map f x) (Map f y))",
        "(Map f (Where c x y))",
        "c:b[A,B] x:f[A,B] y:f[A,B] f:map",
        both=True,
    ),
    Rule(
        "mask by product",
        "(Where c x (Lit ZERO))",
        '(Zip "mul" x (Map "to f32" c))',
        "c:b[A,B] x:f[A,B]",
        both=True,
    ),
)

FUNCTIONS = (
    Rule(
        "sigmoid",
        '(Map "sigmoid" x)',
        '(Map "inv" (Zip "add" (Lit ONE) (Map "exp" (Zip "mul" (Lit MINUS) x))))',
        "x:f[A,B]",
        both=True,
    ),
    Rule(
        "sigmoid of minus",
        '(Map "sigmoid" (Zip "mul" (Lit MINUS) x))',
        '(Zip "add" (Lit ONE) (Zip "mul" (Lit MINUS) (Map "sigmoid" x)))',
        "x:f[A,B]",
        both=True,
    ),
    Rule(
        "exp of a sum",
        '(Map "exp" (Zip "add" x y))',
        '(Zip "mul" (Map "exp" x) (Map "exp" y))',
        "x:f[A,B] y:f[A,B]",
        both=True,
    ),
    Rule(
        "exp of minus",
        '(Map "exp" (Zip "mul" (Lit MINUS) x))',
        '(Map "inv" (Map "exp" x))',
        "x:f[A,B]",
        both=True,
    ),
    Rule("f16 twice", '(Map "to f16" (Map "to f16" x))', '(Map "to f16" x)', "x:f[A,B]"),
    Rule("bf16 twice", '(Map "to bf16" (Map "to bf16" x))', '(Map "to bf16" x)', "x:f[A,B]"),
)

# Changes of shape. `d`, `e` are dimensions, `a`, `b` the ends of a slice.
_FIRST = "(= (to-string n) (vec-get (shape x) d))"

SHAPING = (
    Rule(
        "reshape twice",
        "(Reshape (Reshape x s) t)",
        "(Reshape x t)",
        "x:f[A,B,C] s:d[A*B,C] t:d[C,A*B]",
    ),
    Rule("reshape to itself", "(Reshape x s)", "x", "x:f[A,B] s:d[A,B]", ("(= s (shape x))",)),
    Rule("expand to itself", "(Expand x s)", "x", "x:f[A,B] s:d[A,B]", ("(= s (shape x))",)),
    Rule(
        "expand is broadcasting",
        "(Zip f (Expand x s) y)",
        "(Zip f x y)",
        "x:f[A,1] s:d[A,B] y:f[A,B] f:name",
        ("(= s (shape y))",),
    ),
    Rule(
        "permute twice (2)",
        "(Permute (Permute x p) q)",
        "(Permute x (vec-of (vec-get p (vec-get q 0)) (vec-get p (vec-get q 1))))",
        "x:f[A,B] p:o[1,0] q:o[1,0]",
        ("(= 2 (vec-length q))",),
    ),
    Rule(
        "permute twice (3)",
        "(Permute (Permute x p) q)",
        "(Permute x (vec-of (vec-get p (vec-get q 0)) (vec-get p (vec-get q 1))"
        " (vec-get p (vec-get q 2))))",
        "x:f[A,B,C] p:o[1,2,0] q:o[0,2,1]",
        ("(= 3 (vec-length q))",),
    ),
    Rule(
        "permute twice (4)",
        "(Permute (Permute x p) q)",
        "(Permute x (vec-of (vec-get p (vec-get q 0)) (vec-get p (vec-get q 1))"
        " (vec-get p (vec-get q 2)) (vec-get p (vec-get q 3))))",
        "x:f[A,B,C,D] p:o[1,3,2,0] q:o[2,0,3,1]",
        ("(= 4 (vec-length q))",),
    ),
    Rule("permute nothing (2)", "(Permute x (vec-of 0 1))", "x", "x:f[A,B]"),
    Rule("permute nothing (3)", "(Permute x (vec-of 0 1 2))", "x", "x:f[A,B,C]"),
    Rule("permute nothing (4)", "(Permute x (vec-of 0 1 2 3))", "x", "x:f[A,B,C,D]"),
    Rule(
        "slice of a slice",
        "(Slice (Slice x d a b) d u v)",
        "(Slice x d (+ a u) (+ a v))",
        "x:f[A,E] d:i[1] a:i[1] b:i[E] u:i[1] v:i[E-2]",
    ),
    Rule(
        "slices of two dims",
        "(Slice (Slice x d a b) e u v)",
        "(Slice (Slice x e u v) d a b)",
        "x:f[A,E] d:i[1] a:i[1] b:i[E] e:i[0] u:i[0] v:i[A-1]",
        ("(!= d e)",),
    ),
    Rule("slice of all", "(Slice x d 0 n)", "x", "x:f[A,B] d:i[1] n:i[B]", (_FIRST,)),
    Rule(
        "first of a cat",
        "(Slice (Cat d x y) d 0 n)",
        "x",
        "x:f[A,B] y:f[A,C] d:i[1] n:i[B]",
        (_FIRST,),
    ),
    Rule(
        "last of a cat",
        "(Slice (Cat d x y) d n m)",
        "y",
        "x:f[A,B] y:f[A,C] d:i[1] n:i[B] m:i[B+C]",
        (_FIRST, "(= (to-string (- m n)) (vec-get (shape y) d))"),
    ),
    Rule(
        "slice of a cat",
        "(Slice (Cat d x y) e a b)",
        "(Cat d (Slice x e a b) (Slice y e a b))",
        "x:f[A,B] y:f[A,C] d:i[1] e:i[0] a:i[1] b:i[A]",
        ("(!= d e)",),
    ),
    Rule(
        "cat of slices",
        "(Cat d (Slice x d a b) (Slice x d b n))",
        "(Slice x d a n)",
        "x:f[A,E] d:i[1] a:i[1] b:i[2] n:i[E]",
    ),
    Rule(
        "cat of a cat",
        "(Cat d (Cat d x y) z)",
        "(Cat d x (Cat d y z))",
        "x:f[A,B] y:f[A,C] z:f[A,D] d:i[1]",
        both=True,
    ),
    Rule(
        "product transposed",
        "(Permute (Matmul x y) (vec-of 1 0))",
        "(Matmul (Permute y (vec-of 1 0)) (Permute x (vec-of 1 0)))",
        "x:f[A,B] y:f[B,C]",
        both=True,
    ),
)


def _elementwise() -> Iterator[Rule]:
    """What is computed for each element may be computed before or after a change of shape."""
    shapes = {
        "reshape": (
            "(Reshape {} s)",
            "x:f[A,B,C] y:f[A,B,C]|f[C] k:f[]|f[B,C] s:d[A*B,C]",
            "A,B,C",
        ),
        "permute": ("(Permute {} p)", "x:f[A,B,C] y:f[A,B,C] k:f[]|f[C] p:o[2,0,1]", "A,B,C"),
        "slice": (
            "(Slice {} d a b)",
            "x:f[A,E] y:f[A,E]|f[A,1] k:f[]|f[E] d:i[1] a:i[1] b:i[3]",
            "A,E",
        ),
    }
    for name, (change, draw, inside) in shapes.items():
        x, y = change.format("x"), change.format("y")
        yield Rule(
            f"map of a {name}",
            f"(Map f {x})",
            change.format("(Map f x)"),
            f"{draw} f:map",
            both=True,
        )
        yield Rule(
            f"zip of a {name}",
            f"(Zip f {x} {y})",
            change.format("(Zip f x y)"),
            f"{draw} f:name",
            (_SAME,),
            both=True,
        )
        yield Rule(
            f"zip of a {name} and a scalar",
            f"(Zip f {x} k)",
            change.format("(Zip f x k)"),
            f"{draw} f:name",
            (_SCALAR,),
            both=True,
        )
        yield Rule(
            f"zip of a scalar and a {name}",
            f"(Zip f k {x})",
            change.format("(Zip f k x)"),
            f"{draw} f:name",
            (_SCALAR,),
            both=True,
        )
        yield Rule(
            f"where of a {name}",
            f"(Where {change.format('c')} {x} {y})",
            change.format("(Where c x y)"),
            f"{draw} c:b[{inside}]",
            (_SAME, "(= (shape c) (shape x))"),
            both=True,
        )
    two = "x:f[A,B] y:f[A,C] z:f[A,B] w:f[A,C] k:f[] d:i[1]"
    yield Rule(
        "map of a cat",
        "(Map f (Cat d x y))",
        "(Cat d (Map f x) (Map f y))",
        f"{two} f:map",
        both=True,
    )
    yield Rule(
        "zip of cats",
        "(Zip f (Cat d x y) (Cat d z w))",
        "(Cat d (Zip f x z) (Zip f y w))",
        f"{two} f:name",
        ("(= (shape x) (shape z))", "(= (shape y) (shape w))"),
        both=True,
    )
    yield Rule(
        "zip of a cat and a scalar",
        "(Zip f (Cat d x y) k)",
        "(Cat d (Zip f x k) (Zip f y k))",
        f"{two} f:name",
        (_SCALAR,),
        both=True,
    )
    yield Rule(
        "map of an expand",
        "(Map f (Expand x s))",
        "(Expand (Map f x) s)",
        "x:f[A,1] s:d[A,B] f:map",
        both=True,
    )


_LINEAR = ("(linear o)",)


def _linear() -> Iterator[Rule]:
    """What is linear over the reals: matrix products, linear layers, sums."""
    forms = {
        "product": ("(Matmul {} m)", "x:f[A,B] y:f[A,B] m:f[B,C]", ()),
        "product of a matrix": ("(Matmul m {})", "m:f[C,A] x:f[A,B] y:f[A,B]", ()),
        "linear layer": (
            "(Op o (Cons {} (Nil)) r)",
            "x:f[A,L] y:f[A,L] o:linear r:weight",
            _LINEAR,
        ),
        "sum": ('(Reduce "sum" {} d)', "x:f[A,B] y:f[A,B] d:i[1]", ()),
    }
    for name, (form, draw, when) in forms.items():
        yield Rule(
            f"scaled {name}",
            form.format('(Zip "mul" (Lit a) x)'),
            f'(Zip "mul" (Lit a) {form.format("x")})',
            f"{draw} a:q",
            when,
            both=True,
        )
        yield Rule(
            f"{name} of a sum",
            form.format('(Zip "add" x y)'),
            f'(Zip "add" {form.format("x")} {form.format("y")})',
            draw,
            (_SAME, *when),
            both=True,
        )


# A token row of the result is computed from that row of the operands. These rules only push `Row`
# inwards; there is none of it in a graph that is compared as a whole.
_LEAD = "(= (vec-get (shape x) 0) (vec-get {} 0))"
_RANKS = "(= (vec-length (shape x)) (vec-length (shape y)))"
_LOWER = "(< (vec-length (shape y)) (vec-length (shape x)))"

ROWS = (
    Rule("row of a map", "(Row (Map f x))", "(Map f (Row x))", "x:f[T,B] f:map"),
    Rule(
        "row of a zip",
        "(Row (Zip f x y))",
        "(Zip f (Row x) (Row y))",
        "x:f[T,A,B] y:f[T,1,B] f:name",
        (_LEAD.format("(shape y)"), _RANKS),
    ),
    Rule(
        "row of a zip with what all rows share",
        "(Row (Zip f x y))",
        "(Zip f (Row x) y)",
        "x:f[T,B] y:f[B] f:name",
        (_LOWER,),
    ),
    Rule(
        "row of a zip of what all rows share",
        "(Row (Zip f y x))",
        "(Zip f y (Row x))",
        "x:f[T,B] y:f[B] f:name",
        (_LOWER,),
    ),
    Rule(
        "row of a where",
        "(Row (Where c x y))",
        "(Where (Row c) (Row x) (Row y))",
        "c:b[T,B] x:f[T,B] y:f[T,B]",
        (_SAME, "(= (shape c) (shape x))"),
    ),
    Rule(
        "row of a where with a scalar",
        "(Row (Where c x k))",
        "(Where (Row c) (Row x) k)",
        "c:b[T,B] x:f[T,B] k:f[]",
        (_SCALAR, "(= (shape c) (shape x))"),
    ),
    Rule(
        "row of a reshape",
        "(Row (Reshape x s))",
        '(Reshape (Row x) (vec-set s 0 "1"))',
        "x:f[T,A,B] s:d[T,A*B]",
        (_LEAD.format("s"),),
    ),
    Rule(
        "row of a permute",
        "(Row (Permute x p))",
        "(Permute (Row x) p)",
        "x:f[T,A,B] p:o[0,2,1]",
        ("(= 0 (vec-get p 0))",),
    ),
    Rule(
        "row of a slice",
        "(Row (Slice x d a b))",
        "(Slice (Row x) d a b)",
        "x:f[T,E] d:i[1]|i[0] a:i[1] b:i[E]|i[T]",
        ("(> d 0)",),
    ),
    Rule(
        "row of a cat",
        "(Row (Cat d x y))",
        "(Cat d (Row x) (Row y))",
        "x:f[T,A] y:f[T,B]|f[T,A] d:i[1]|i[0]",
        ("(> d 0)",),
    ),
    Rule(
        "row of a sum",
        "(Row (Reduce f x d))",
        "(Reduce f (Row x) d)",
        "x:f[T,A] d:i[1]|i[0] f:reduce",
        ("(> d 0)",),
    ),
    Rule("row of a norm", "(Row (Norm x w k))", "(Norm (Row x) w k)", "x:f[T,A] w:f[A] k:eps"),
    Rule(
        "norm of a reshape",
        "(Norm (Reshape x s) w k)",
        "(Reshape (Norm x w k) s)",
        "x:f[T,A,B] s:d[T*A,B] w:f[B] k:eps",
        ("(= (vec-get s (- (vec-length s) 1)) (vec-get (shape x) (- (vec-length (shape x)) 1)))",),
        both=True,
    ),
    Rule(
        "row of an op",
        "(Row (Op o (Cons x r) c))",
        "(Op o (Rows (Cons x r)) c)",
        "x:f[T,L] r:none o:linear c:weight",
    ),
    Rule(
        "row of one result of an op",
        "(Row (Get (Op o (Cons x r) c) i))",
        "(Get (Op o (Rows (Cons x r)) c) i)",
        "x:f[T,E] r:none o:route c:correction[E] i:i[1]",
    ),
    Rule("row of nothing", "(Rows (Nil))", "(Nil)", ""),
    Rule("row of each", "(Rows (Cons x r))", "(Cons (Row x) (Rows r))", "x:f[T,A] r:list[T,B]"),
    Rule(
        "row of attention",
        "(Row (Attend o q n c))",
        "(Attend o (Row q) (Rows n) (At n c))",
        "attention",
    ),
    Rule(
        "all of a context (3)",
        "(Cons (Item m 0) (Cons (Item m 1) (Cons (Item m 2) (Nil))))",
        "m",
        "m:list3[A,B]",
    ),
    Rule(
        "all of a context (4)",
        "(Cons (Item m 0) (Cons (Item m 1) (Cons (Item m 2) (Cons (Item m 3) (Nil)))))",
        "m",
        "m:list4[A,B]",
    ),
)

# A feature's op whose inputs say that a request does not use it.
_BIAS = '"trnc.logit_bias.default(#, #, #)"'
_MASK = '"trnc.apply_mask.default(#, #)"'
_PENALTIES = '"trnc.penalize.default(#, #, #, #, #, #)"'
_OFF = "(Expand (Lit {}) {})"
NEUTRAL = (
    Rule(
        "no bias: values of 0",
        f"(Op {_BIAS} (Cons x (Cons n (Cons {_OFF.format('ZERO', 's')} (Nil)))) (Nil))",
        "x",
        "x:f[A,E] n:ids[A,B] s:d[A,B]",
    ),
    Rule(
        "no bias: unused ids",
        f"(Op {_BIAS} (Cons x (Cons {_OFF.format('MINUS', 's')} (Cons v (Nil)))) (Nil))",
        "x",
        "x:f[A,E] v:f[A,B] s:d[A,B]",
    ),
    Rule(
        "no mask: every bit is 1",
        f"(Op {_MASK} (Cons x (Cons {_OFF.format('MINUS', 's')} (Nil))) (Nil))",
        "x",
        "x:f[A,E] s:d[A,1]",
    ),
    Rule(
        "no penalties: unused ids",
        f"(Op {_PENALTIES} (Cons x (Cons {_OFF.format('MINUS', 's')} r)) (Nil))",
        "x",
        "x:f[A,E] s:d[A,B] r:penalties[A,B]",
    ),
    Rule(
        "no penalties: factors of 1 and 0",
        f"(Op {_PENALTIES} (Cons x (Cons n (Cons c (Cons {_OFF.format('ONE', 's')}"
        f" (Cons {_OFF.format('ZERO', 's')} (Cons {_OFF.format('ZERO', 's')} (Nil))))))) (Nil))",
        "x",
        "x:f[A,E] n:ids[A,B] c:ids[A,B] s:d[A]",
    ),
)

# Rules that leave less than there was, in any graph. "collect one" is none of them: of a term that
# is 0 it makes multiples without end.
_SIMPLER = frozenset(
    (
        *(f"fold {name}" for name in ("sum", "product", "inverse")),
        *(f"{name} twice" for name in ("inverse", "not", "f16", "bf16", "reshape")),
        *(f"permute {name} ({rank})" for name in ("twice", "nothing") for rank in (2, 3, 4)),
        *(f"{name} of a cat" for name in ("first", "last")),
        *(f"{name} to itself" for name in ("reshape", "expand")),
        "add zero",
        "times one",
        "slice of all",
    )
)


def _directed(rule: Rule) -> Rule:
    return replace(rule, directed=rule.name in _SIMPLER)


RULES: tuple[Rule, ...] = (
    *map(_directed, (*ARITHMETIC, *FUNCTIONS, *SHAPING)),
    *_elementwise(),
    *_linear(),
    *(replace(rule, directed=True) for rule in (*ROWS, *NEUTRAL)),
)
