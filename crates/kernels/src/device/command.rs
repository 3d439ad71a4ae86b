//! What a device is asked to do: kernels, fills and copies.

use super::{Buffer, Device, DeviceError};

/// Most threads of a block, and most blocks along the second and third axis of a grid, on every GPU.
const MOST_THREADS: u32 = 1024;
const MOST_BLOCKS_YZ: u32 = 65_535;

/// One argument of a kernel.
#[derive(Clone)]
pub enum Argument {
    /// The address of a byte of a buffer.
    Pointer(Buffer, usize),
    /// A 32-bit signed integer.
    I32(i32),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// An f32.
    F32(f32),
}

/// One launch of a kernel, complete.
#[derive(Clone)]
pub struct Launch {
    /// Name of the kernel in its .cu.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// All blocks run at once and may wait for each other.
    pub cooperative: bool,
    /// In the order of the kernel's parameters.
    pub arguments: Vec<Argument>,
}

/// One thing for a device to do.
#[derive(Clone)]
pub enum Command {
    /// A kernel.
    Launch(Launch),
    /// Sets bytes.
    Fill {
        /// Where.
        buffer: Buffer,
        /// First byte.
        offset: usize,
        /// How many.
        bytes: usize,
        /// To what.
        byte: u8,
    },
    /// Copies bytes between buffers; either may be pinned.
    Copy {
        /// From where.
        from: Buffer,
        /// First byte of it.
        from_offset: usize,
        /// To where.
        to: Buffer,
        /// First byte of it.
        to_offset: usize,
        /// How many.
        bytes: usize,
    },
}

impl From<Launch> for Command {
    fn from(launch: Launch) -> Command {
        Command::Launch(launch)
    }
}

impl Argument {
    /// The parameter's bytes, and how many of them count.
    pub(super) fn to_bytes(&self) -> ([u8; 8], u32) {
        let four = |b: [u8; 4]| ([b[0], b[1], b[2], b[3], 0, 0, 0, 0], 4);
        match self {
            Argument::Pointer(buffer, offset) => ((buffer.0.address + *offset as u64).to_le_bytes(), 8),
            Argument::U64(v) => (v.to_le_bytes(), 8),
            Argument::I32(v) => four(v.to_le_bytes()),
            Argument::U32(v) => four(v.to_le_bytes()),
            Argument::F32(v) => four(v.to_le_bytes()),
        }
    }

    fn describe(&self) -> String {
        match self {
            Argument::Pointer(buffer, 0) => format!("{}[{}]", buffer.name(), buffer.bytes()),
            Argument::Pointer(buffer, offset) => format!("{}[{}] + {offset}", buffer.name(), buffer.bytes()),
            Argument::I32(v) => v.to_string(),
            Argument::U32(v) => v.to_string(),
            Argument::U64(v) => v.to_string(),
            Argument::F32(v) => v.to_string(),
        }
    }
}

impl Launch {
    /// Kernel, grid, block, shared memory and arguments, as errors name it; of buffers the name and the size in bytes.
    pub fn describe(&self) -> String {
        let [x, y, z] = self.grid;
        let arguments: Vec<String> = self.arguments.iter().map(Argument::describe).collect();
        let cooperative = if self.cooperative { ", cooperative" } else { "" };
        format!(
            "{}<<<({x}, {y}, {z}), {}, {} bytes shared{cooperative}>>>({})",
            self.kernel,
            self.block,
            self.shared_bytes,
            arguments.join(", ")
        )
    }

    fn check(&self, device: &Device) -> Result<(), DeviceError> {
        let refuse = |reason: String| Err(DeviceError::Launch { launch: self.describe(), reason });
        let blocks: u64 = self.grid.iter().map(|&n| u64::from(n)).product();
        if blocks == 0 || blocks > u64::from(u32::MAX) || self.block == 0 {
            return refuse("a grid or a block without threads, or with too many".into());
        }
        if self.block > MOST_THREADS
            || self.grid[0] > i32::MAX as u32
            || self.grid[1..].iter().any(|&n| n > MOST_BLOCKS_YZ)
        {
            return refuse(format!(
                "a block has at most {MOST_THREADS} threads, a grid {MOST_BLOCKS_YZ} blocks across"
            ));
        }
        let most = device.properties().shared_bytes;
        if self.shared_bytes > most {
            return refuse(format!("a block has at most {most} bytes of shared memory"));
        }
        for argument in &self.arguments {
            if let Argument::Pointer(buffer, offset) = argument {
                if !buffer.0.device.same(device) {
                    return refuse(format!("buffer {} belongs to another device", buffer.name()));
                }
                if *offset > buffer.bytes() {
                    return refuse(format!("offset {offset} is past the end of buffer {}", buffer.name()));
                }
            }
        }
        Ok(())
    }
}

impl Command {
    /// As errors name it.
    pub fn describe(&self) -> String {
        match self {
            Command::Launch(launch) => launch.describe(),
            Command::Fill { buffer, offset, bytes, byte } => {
                format!("fill of {bytes} bytes of {} at {offset} with {byte}", buffer.name())
            }
            Command::Copy { from, from_offset, to, to_offset, bytes } => {
                format!("copy of {bytes} bytes of {} at {from_offset} to {} at {to_offset}", from.name(), to.name())
            }
        }
    }

    /// What can be known of a command before it runs.
    pub(super) fn check(&self, device: &Device) -> Result<(), DeviceError> {
        let belongs = |buffer: &Buffer| match buffer.0.device.same(device) {
            true => Ok(()),
            false => Err(DeviceError::Launch {
                launch: self.describe(),
                reason: format!("buffer {} belongs to another device", buffer.name()),
            }),
        };
        match self {
            Command::Launch(launch) => launch.check(device),
            Command::Fill { buffer, offset, bytes, .. } => {
                belongs(buffer)?;
                buffer.check(*offset, *bytes, "written")
            }
            Command::Copy { from, from_offset, to, to_offset, bytes } => {
                belongs(from)?;
                belongs(to)?;
                from.check(*from_offset, *bytes, "read")?;
                to.check(*to_offset, *bytes, "written")
            }
        }
    }
}
