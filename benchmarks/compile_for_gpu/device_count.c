/* Preloaded: torch's C++ side sees one device once fake_h200 has said so. */
static signed char count = 0;
void fake_gpu_devices(int n) { count = (signed char)n; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char i) { return 0; }
signed char _ZN3c104cuda12device_countEv(void) { return count; }
