# shellcheck shell=bash
# Makes the host's NVIDIA driver visible to a program from the Nix store; where there must be one, or ends with exit code 3 and what to do.
# To be sourced.
#
# The driver belongs to the host's kernel and cannot come from Nix. On NixOS it lies where the program looks by itself. Elsewhere
# it lies among the host's other libraries, which must stay invisible: they would replace the program's own. So a folder with links
# to the driver alone goes on the search path.

chiku_find_driver() {
    local folder place
    local -a places
    IFS=: read -r -a places <<<"${CHIKU_DRIVER_PATH-/run/opengl-driver/lib:${LD_LIBRARY_PATH-}:/usr/lib/x86_64-linux-gnu:/usr/lib64:/usr/lib/wsl/lib:/usr/lib/nvidia}"
    for place in "${places[@]}"; do
        [ -n "$place" ] && [ -e "$place/libcuda.so.1" ] || continue
        # WSL's folder holds the driver alone, and its libraries look for each other there.
        if [ "$place" = /usr/lib/wsl/lib ]; then
            export LD_LIBRARY_PATH=$place${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
            return 0
        fi
        # Here the program finds it by itself.
        case ":/run/opengl-driver/lib:${LD_LIBRARY_PATH-}:" in *":$place:"*) return 0 ;; esac
        folder=${CHIKU_CACHE:-${XDG_CACHE_HOME:-${HOME:-${TMPDIR:-/tmp}}/.cache}/chiku}/driver
        mkdir -p "$folder" || return 1
        for library in libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1; do
            if [ -e "$place/$library" ]; then ln -sfn "$place/$library" "$folder/$library"; fi
        done
        export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        return 0
    done
    return 1
}

# For a program that is nothing without a GPU.
chiku_need_driver() {
    chiku_find_driver && return
    cat >&2 <<'TEXT'
error: no NVIDIA driver: libcuda.so.1 is in none of the usual folders
  Install the driver, or name its folder in CHIKU_DRIVER_PATH. `nix run .#doctor` says what this machine has.
  Without a GPU: nix run .#default -- COMMAND runs the same commands on the CPU.
TEXT
    exit 3
}
