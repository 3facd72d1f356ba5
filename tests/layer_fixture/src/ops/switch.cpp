// Planted: the backend switch outside its places.
#if BIFOCAL_WITH_CUDA
#endif
