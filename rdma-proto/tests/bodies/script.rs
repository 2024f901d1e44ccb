/// An input as a program. After its end everything is zero.
pub(crate) struct Script<'a> {
    rest: &'a [u8],
}

impl<'a> Script<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    pub(crate) fn step(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.step().unwrap_or_default()
    }

    pub(crate) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    pub(crate) fn flag(&mut self) -> bool {
        self.byte() % 2 == 1
    }

    /// `range` has at most 256 numbers.
    pub(crate) fn within(&mut self, range: std::ops::RangeInclusive<u32>) -> u32 {
        let count = range.end() - range.start() + 1;
        range.start() + u32::from(self.byte()) % count
    }

    pub(crate) fn number(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }
}
