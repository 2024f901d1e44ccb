//! What one turn of an endpoint takes and tells, in virtual time.

use std::collections::HashMap;
use std::io::IoSlice;
use std::time::Duration;

use rdma_conn::{ConnectionId, Endpoint, Event, Events, Limits};
use rdma_softsim::{
    DeviceKind, Fault, FaultPlan, Injection, Simulation, SimulationSettings, Site, SoftSim, When,
};

use crate::world::{pass, small};

const LONG: Duration = Duration::from_secs(20);
const SERVER: [u8; 4] = [192, 0, 2, 1];
const CLIENT: [u8; 4] = [192, 0, 2, 2];

fn simulated(plan: FaultPlan) -> (Simulation, [Endpoint<SoftSim>; 2]) {
    let sim = Simulation::new(1, DeviceKind::Ibta, SimulationSettings::default(), plan);
    let hosts = [SERVER, CLIENT].map(|address| sim.host(&[address.into()], rdma_softsim::Limits::default()));
    (sim, hosts.map(|host| Endpoint::new(&host, Limits::default()).expect("a device")))
}

#[test]
fn all_events_of_a_connection_come_together() {
    let (sim, [mut server, mut client]) = simulated(FaultPlan::new());
    let by = server.listen((SERVER, 6379).into(), small()).expect("a free address");
    for abandons in [false, true] {
        let id = client.connect((SERVER, 6379).into(), None, LONG, small()).expect("begins");
        let mut opened = None;
        while opened.is_none() || !client.is_open(id) {
            server.progress().expect("the fabric stays");
            client.progress().expect("the fabric stays");
            opened = opened.or(server.next_events());
            sim.step();
        }
        let Some(Events { kinds: Events::OPENED, id: Some(there), listener, .. }) = opened else {
            panic!("{opened:?}")
        };
        assert_eq!(listener, Some(by));
        while client.write(id, &[IoSlice::new(b"x")]).expect("open").is_none() {
            client.progress().expect("the fabric stays");
            sim.step();
        }
        if !abandons {
            client.close(id, LONG).expect("it is there");
            while client.closed(id).expect("in order").is_none() {
                client.progress().expect("the fabric stays");
                sim.step();
            }
        }
        pass(&sim, Duration::from_millis(1));
        server.progress().expect("the fabric stays");
        if abandons {
            // A byte that is not delivered yet: it does not end at once.
            assert_eq!(server.write(there, &[IoSlice::new(b"y")]).expect("open"), Some(1));
            server.abandon(there, LONG).expect("it is there");
            assert_eq!(server.usage().connections, 1);
        } else {
            let told = server.next_events().expect("both");
            assert_eq!(told.kinds, Events::READABLE | Events::ENDED);
            assert_eq!((told.id, told.listener), (Some(there), None));
            server.abort(there);
        }
        assert_eq!((server.next_events(), server.next_event()), (None, None));
    }
}

/// VR-RES-007: many requests delay no established connection. A turn answers a few of them.
#[test]
fn requests_are_answered_a_few_at_a_time() {
    const MANY: usize = 100;
    let (sim, [mut server, mut client]) = simulated(FaultPlan::new());
    server.listen((SERVER, 6379).into(), small()).expect("a free address");
    for _ in 0..MANY {
        client.connect((SERVER, 6379).into(), None, LONG, small()).expect("begins");
    }
    // Until the last request is there: answers are not needed for that.
    for _ in 0..20 {
        client.progress().expect("the fabric stays");
        pass(&sim, Duration::from_millis(1));
    }
    let mut turns = 0;
    while server.usage().accepted < MANY as u64 {
        let before = server.usage().accepted;
        server.progress().expect("the fabric stays");
        let accepted = server.usage().accepted - before;
        assert!((1..=16).contains(&accepted), "{accepted} requests in one turn");
        turns += 1;
        if server.usage().accepted < MANY as u64 {
            assert_eq!(server.next_timeout(), Some(server.now()), "there is more to do");
        }
    }
    assert!(turns >= MANY / 16, "{turns} turns");
}

/// VR-RES-007: peers that leave together delay no other connection. A turn handles a few of them.
#[test]
fn ends_are_handled_a_few_at_a_time() {
    const MANY: usize = 100;
    let (sim, [mut server, mut client]) = simulated(FaultPlan::new());
    server.listen((SERVER, 6379).into(), small()).expect("a free address");
    for _ in 0..MANY {
        client.connect((SERVER, 6379).into(), None, LONG, small()).expect("begins");
    }
    let mut open = 0;
    while open < MANY {
        sim.step();
        client.progress().expect("the fabric stays");
        server.progress().expect("the fabric stays");
        while let Some(event) = server.next_event() {
            open += usize::from(matches!(event, Event::Opened { .. }));
        }
    }
    drop(client);
    pass(&sim, Duration::from_millis(10));
    let (mut ended, mut turns) = (0, 0);
    while ended < MANY {
        server.progress().expect("the fabric stays");
        let before = ended;
        while let Some(event) = server.next_event() {
            ended += usize::from(matches!(event, Event::Ended(_)));
        }
        assert!((1..=32).contains(&(ended - before)), "{} ends in one turn", ended - before);
        turns += 1;
        if ended < MANY {
            assert_eq!(server.next_timeout(), Some(server.now()), "there is more to do");
        }
    }
    assert!(turns >= MANY.div_ceil(32), "{turns} turns");
}

#[test]
fn a_lost_queue_is_its_own_connections_affair() {
    let lost = Injection { when: When::Pass(Site::Report, 8), host: 0, fault: Fault::QueueLost };
    let (sim, [mut server, mut client]) = simulated(vec![lost]);
    // A queue for each completion vector.
    for (port, completion_vector) in [(6379, 0), (6380, 1)] {
        let options = small().completion_vector(completion_vector);
        server.listen((SERVER, port).into(), options).expect("a free address");
        client.connect((SERVER, port).into(), None, LONG, small()).expect("begins");
    }
    let mut open = Vec::new();
    let mut ended = Vec::new();
    let mut heard: HashMap<ConnectionId, usize> = HashMap::new();
    let mut clients = Vec::new();
    for _ in 0..10_000 {
        sim.step();
        server.progress().expect("the endpoint goes on");
        client.progress().expect("nothing befell it");
        while let Some(event) = server.next_event() {
            match event {
                Event::Opened { id, .. } => open.push(id),
                Event::Readable(id) => {
                    while let Ok(Some(read)) = server.read(id, &mut [0; 64]) {
                        if read == 0 {
                            break;
                        }
                        *heard.entry(id).or_default() += read;
                    }
                }
                Event::Ended(id) => ended.push(id),
                _ => {}
            }
        }
        while let Some(event) = client.next_event() {
            if let Event::Opened { id, .. } = event {
                clients.push(id);
            }
        }
        if clients.len() == 2 {
            for id in &clients {
                _ = client.write(*id, &[IoSlice::new(b"!")]);
            }
        }
        let over = |id: &&ConnectionId| ended.contains(id);
        let heard = |id: &&ConnectionId| heard.get(id).is_some_and(|heard| *heard > 20);
        if open.iter().filter(over).count() == 1
            && open.iter().filter(|id| !over(id)).filter(heard).count() == 1
        {
            let error = server.check(ended[0]).expect_err("its queue is lost");
            // It is armed before it is polled.
            assert!(error.to_string().contains("ibv_req_notify_cq"), "{error}");
            return;
        }
    }
    panic!("{ended:?} of {open:?} ended, {heard:?}");
}

#[test]
fn a_successor_gets_none_of_its_predecessors_completions() {
    let (sim, [mut server, mut client]) = simulated(FaultPlan::new());
    let settle = |endpoints: &mut [&mut Endpoint<SoftSim>]| {
        for _ in 0..200 {
            for endpoint in &mut *endpoints {
                endpoint.progress().expect("the fabric stays");
                while endpoint.next_event().is_some() {}
            }
            sim.step();
        }
    };
    server.listen((SERVER, 6379).into(), small()).expect("a free address");
    let connect = |client: &mut Endpoint<SoftSim>, server: &mut Endpoint<SoftSim>| {
        let id = client.connect((SERVER, 6379).into(), None, LONG, small()).expect("begins");
        settle(&mut [client, server]);
        assert!(client.is_open(id));
        id
    };
    // This one stays, so that the queue does.
    let _stays = connect(&mut client, &mut server);
    for _ in 0..20 {
        let id = connect(&mut client, &mut server);
        assert_eq!(client.write(id, &[IoSlice::new(b"unseen")]).expect("is open"), Some(6));
        // Its completions are there, but not polled.
        for _ in 0..50 {
            sim.step();
        }
        client.abort(id);
        let successor = connect(&mut client, &mut server);
        let connection = client.connection(successor).expect("is there");
        assert_eq!(connection.counters().bytes_received, 0);
        assert!(connection.check().is_ok() && connection.unconfirmed() == 0);
        assert_eq!(client.write(successor, &[IoSlice::new(b"!")]).expect("is open"), Some(1));
        settle(&mut [&mut client, &mut server]);
        client.check(successor).expect("nothing befell it");
        client.abort(successor);
        settle(&mut [&mut client, &mut server]);
    }
}
