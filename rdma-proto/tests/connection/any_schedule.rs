//! See [`bodies::pair`].

use proptest::prelude::*;

use crate::bodies;

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 2000 }, ..ProptestConfig::default() })]

    /// VR-XFER-001, VR-FLOW-005, VR-CLOSE-001.
    #[test]
    fn all_bytes_arrive_in_every_schedule(script in prop::collection::vec(any::<u8>(), 0..1200)) {
        bodies::pair::run(&script);
    }
}
