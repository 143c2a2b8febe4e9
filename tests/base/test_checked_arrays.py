import numpy as np

from tomat.base.checked_arrays import arrays_checksum, pack_arrays, unpack_arrays

ARRAYS = {"a": np.arange(12.0).reshape(3, 4), "b": np.array(["x", "yz"]), "none": np.empty((0, 3))}


def test_round_trip_is_exact_and_bytes_are_those_of_the_content():
    content = pack_arrays(ARRAYS)
    found = unpack_arrays(content, "f.npz", "arrays", "Again.")
    assert found.keys() == ARRAYS.keys()
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(found[name], values, strict=True)
    assert pack_arrays(dict(reversed(ARRAYS.items()))) == content


def test_checksum_is_of_names_types_shapes_and_values():
    a = ARRAYS["a"]
    changed = [{**ARRAYS, "a": other} for other in (a.reshape(4, 3), a.astype(np.float32), a + np.eye(3, 4))]
    changed.append({"c" if name == "a" else name: values for name, values in ARRAYS.items()})
    assert len({arrays_checksum(each) for each in (ARRAYS, *changed)}) == 5
    big = {**ARRAYS, "a": np.asfortranarray(ARRAYS["a"]).astype(">f8")}
    assert arrays_checksum(big) == arrays_checksum(ARRAYS)
