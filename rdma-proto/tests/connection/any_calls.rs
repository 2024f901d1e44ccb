//! See [`bodies::connection`].

use proptest::prelude::*;

use crate::bodies;

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 3 } else { 3000 }, ..ProptestConfig::default() })]

    /// VR-SEC-003, VR-FLOW-007, VR-CLOSE-006.
    #[test]
    fn no_calls_break_the_machine(script in prop::collection::vec(any::<u8>(), 0..800)) {
        bodies::connection::run(&script);
    }
}
