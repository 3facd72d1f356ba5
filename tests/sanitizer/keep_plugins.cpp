// Linked into sanitized programs only. Open MPI unloads its plug-ins at the end, and a leak report
// then knows the module of their frames no more, so that no suppression can name it. They stay.
extern "C" int dlclose(void*) noexcept {
  return 0;
}
