"""What the pages on leakage and poisoning say of attacks is so in the committed runs."""

from reproduction.tables import attacks as poisoning, attacks as tables


def test_the_goals_that_the_documents_claim_are_met() -> None:
    noisy = [run["features"][-1]["decoder"]["ssim"] for run in tables.by_seed("noise0.14")]
    assert tables.mean(noisy) <= 0.44 and tables.mean(tables.lost("noise0.14")) <= 2
    for clients in poisoning.FLEETS:
        for attack, by_rule in poisoning.points_lost(clients).items():
            assert tables.mean(by_rule[poisoning.SERVED]) <= 1, (attack, clients)
    above = {
        (*case, round(tables.mean(lost["serve"]), 1))
        for case, lost in poisoning.network_losses().items()
        if tables.mean(lost["serve"]) > 1 + 1e-9
    }
    assert above == {
        ("semisfl", 3, 1, 28, "one_class", 1.0),
        ("semisfl", 5, 2, 28, "one_class", 1.1),
        ("fedswitch", 3, 1, 24, "reversed_update", 1.3),
        ("semifl", 3, 1, 24, "reversed_update", 3.4),
    }
    for run in poisoning.named("network"):
        assert not run["honest_struck"] and not run["honest_gone"], run
