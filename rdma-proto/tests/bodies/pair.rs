//! Two machines and an arbitrary scheduler. All bytes arrive in the end.

use std::time::Duration;

use rdma_proto::wire::FeatureSet;
use rdma_proto::{Config, Keepalive, State};

use super::Script;
use crate::pair::{Client, Pair, Server};

pub(crate) fn run(input: &[u8]) {
    let mut script = Script::new(input);
    let (client, server) = (settings(&mut script, Config::client()), settings(&mut script, Config::server()));
    let mut pair = Pair::new(client, server);
    // As Valkey does: a send without a receive is fatal.
    let fatal = script.flag();
    let closer = if script.flag() { Client } else { Server };
    if fatal {
        pair.client.rnr_retry = 0;
    }
    while let Some(step) = script.step() {
        let who = if step & 0x80 == 0 { Client } else { Server };
        match step & 0x0f {
            0 => {
                let bytes = usize::from(script.byte());
                pair.side(who).write(bytes);
            }
            1 => {
                let bytes = usize::from(script.byte());
                pair.side(who).lend(bytes);
            }
            2 | 3 => {
                let bytes = usize::from(script.byte());
                pair.side(who).read(bytes);
            }
            4 => {
                pair.post_one(who);
            }
            5 | 6 => {
                pair.post(who);
            }
            7..=9 => {
                pair.carry(who);
            }
            10 | 11 => {
                pair.handle(who);
            }
            12 | 13 => {
                pair.report(who);
            }
            14 => pair.establish(who),
            _ => pair.advance(Duration::from_millis(script.byte().into())),
        }
        if fatal {
            assert!(
                pair.unhandled(Client) <= usize::from(client.peer_receives),
                "the peer's receives are overrun"
            );
        }
    }

    pair.establish(Client);
    pair.establish(Server);
    pair.finish([100, 100]);
    for who in [Client, Server] {
        assert_eq!(pair.side(who).state(), State::Open);
    }

    let now = pair.now;
    let side = pair.side(closer);
    side.write(40);
    side.machine.close(now, Duration::from_secs(1));
    pair.finish([0, 0]);
    for who in [Client, Server] {
        assert_eq!((pair.side(who).state(), pair.side(who).disconnects()), (State::Closed, 1), "{pair:?}");
    }
}

fn settings(script: &mut Script<'_>, base: Config) -> Config {
    let interval = |script: &mut Script<'_>| {
        let millis = script.byte();
        (millis > 127).then(|| Duration::from_millis(millis.into()))
    };
    base.window(script.within(1..=64))
        .windows(script.within(1..=2) as u8)
        .send_buffer(script.within(1..=64))
        .send_depth(script.within(1..=40) as u16)
        .peer_receives(script.within(2..=20) as u16)
        .negotiate(script.flag())
        .keepalive(Some(Keepalive::NONE.every(interval(script)).probe(interval(script))))
        .features(if script.flag() { FeatureSet::MULTI_BUFFER } else { FeatureSet::NONE })
}
