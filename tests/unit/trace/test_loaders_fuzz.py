from campaign.fuzz_loaders import recordings, run


def test_damaged_traces_load_or_are_refused_and_come_back() -> None:
    originals = [data[:60_000] for data in recordings()]
    assert run(originals, seed=5, rounds=80) == 80
