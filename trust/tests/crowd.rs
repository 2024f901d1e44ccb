//! The cost of connections on each face, measured alone in this process so that its descriptors can be counted.

use trust::crowd::{Face, Load, on_softsim};

/// Idle connections cost no more registered memory, completion queues or descriptors on a `Server` or on tokio than on an `Endpoint`.
#[test]
fn every_face_has_its_connections_for_the_price_of_an_endpoint() {
    let load = Load { connections: 400, mute: 0, window: 128 << 10, requests: 10, seconds: 0 };
    let [endpoint, server, tokio] = [Face::Endpoint, Face::Server, Face::Tokio].map(|face| {
        let figures = on_softsim(face, load).expect("serves");
        println!("{face:?}: {figures:?}");
        figures
    });
    assert!(endpoint.registered_bytes <= 400 * (168 << 10), "{endpoint:?}");
    assert!(endpoint.descriptors <= 2 * 400_usize.div_ceil(64) + 4, "{endpoint:?}");
    for face in [server, tokio] {
        assert!(face.registered_bytes <= endpoint.registered_bytes, "{face:?}, {endpoint:?}");
        assert!(face.completion_queues <= endpoint.completion_queues, "{face:?}, {endpoint:?}");
        assert!(face.descriptors <= endpoint.descriptors, "{face:?}, {endpoint:?}");
    }
}
